"""One self-contained HTML file: the template with its style, its scripts, the data and the compressed pages."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from page.curves import curves, groups
from page.family import family
from page.read import Row, Run, finite, read_run
from page.sample import pack, sample
from page.verdict import verdict
from plumbing.faults import Fault
from plumbing.outside import without_secrets

STATIC = Path(__file__).parent / "static"
SCRIPTS = (
    "vendor/uPlot.iife.min.js dom.js state.js diff.js charts.js first.js tree.js trajectories.js trajectory.js cost.js "
    "main.js"
).split()
STYLES = ("vendor/uPlot.min.css", "style.css")
LIMIT = 1000  # trajectories of training


def build(
    paths: Sequence[Path], *, limit: int = LIMIT, price: tuple[float, float] | None = None, live: str = ""
) -> str:
    """Returns the page of these runs as HTML; Fault if one of the paths holds no run.

    limit: trajectories of training, divided among the runs; price: dollars for a million tokens of prompt and of
    reply; live: what a server says of the files' state, after which the page asks.
    """
    runs = [read_run(path) for path in paths]
    pages: dict[str, str] = {}
    described = []
    for k, run in enumerate(runs):
        found, more = describe(run, max(1, limit // len(runs)))
        described.append(found)
        pages |= {f"{k}/{name}": text for name, text in more.items()}
    data: Row = {
        "runs": described, "groups": groups(runs), "price": price, "live": live,
        "made": time.time(), "pages": list(pages),
    }  # fmt: skip
    return assemble(data, pages)


def write(runs: Sequence[Path], to: Path, *, limit: int = LIMIT, price: tuple[float, float] | None = None) -> Path:
    """Writes the page of these runs into a file, atomically, and returns its path; Fault if it cannot."""
    text = build(runs, limit=limit, price=price)
    temporary = to.with_name(f".{to.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, to)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()  # on a disk that is full, half of it may be there
        raise Fault(f"cannot write {to} ({e.strerror}): make room, or write it elsewhere") from None
    return to


def describe(run: Run, limit: int) -> tuple[Row, dict[str, str]]:
    """Returns (what the page knows of a run at once, what it opens later: name -> compressed text)."""
    tree = family(run)
    index, pages = sample(run, tree, limit)
    pages["calls"] = pack(tree.pop("calls"))
    answers = verdict(run, tree)
    config = {knob: without_secrets(value) if isinstance(value, str) else value for knob, value in run.config.items()}
    return {
        "name": run.name, "config": config, "missing": run.missing, "curves": curves(run), "tree": tree,
        "index": index, "metric": run.metric, "metrics": run.metrics, "tools": run.tools,
        "events": [{"t": e["t"], "event": e.get("event"), "text": e.get("text")} for e in run.events],
    } | answers, pages  # fmt: skip


def assemble(data: Row, pages: dict[str, str]) -> str:
    """Returns the HTML. The data cannot end their element or run: they hold no `<`, and a script needs its hash."""
    script = "\n".join(f"// ---- {name}\n{(STATIC / name).read_text().strip()}\n" for name in SCRIPTS)
    style = "\n".join((STATIC / name).read_text().strip() for name in STYLES)
    script = f"\n{script}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    policy += "; connect-src 'self'; base-uri 'none'; form-action 'none'"
    blocks = [f'<script type="text/plain" id="page-{k}">{text}</script>' for k, text in enumerate(pages.values())]
    parts = {
        "policy": html.escape(policy, quote=True).replace("&#x27;", "'"),
        "title": html.escape(" · ".join(run["name"] for run in data["runs"])),
        "style": style, "script": script, "data": embed(data), "pages": "\n".join(blocks),
        "license": html.escape((STATIC / "vendor" / "uPlot.LICENSE").read_text().replace("--", "- -")),
    }  # fmt: skip
    text = (STATIC / "index.html").read_text()
    out = []
    while "{{" in text:  # in one pass: what is filled in is never looked at again
        before, _, rest = text.partition("{{")
        name, _, text = rest.partition("}}")
        out += [before, parts[name]]
    return "".join([*out, text])


def embed(x: object) -> str:
    """Returns x as JSON that is safe inside a script element."""
    text = json.dumps(finite(x), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace").decode().replace("<", "\\u003c").replace("\u2028", "\\u2028")
