"""One self-contained HTML file: the template with its style, its scripts, the data and the compressed pages."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Sequence
from pathlib import Path

from outside import without_password
from page.curves import curves, groups
from page.family import family
from page.read import Row, Run, finite, read_run
from page.sample import pack, sample
from page.verdict import verdict

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


def describe(run: Run, limit: int) -> tuple[Row, dict[str, str]]:
    """Returns (what the page knows of a run at once, what it opens later: name -> compressed text)."""
    tree = family(run)
    index, pages = sample(run, tree, limit)
    pages["calls"] = pack(tree.pop("calls"))
    answers = verdict(run, tree)
    config = {knob: without_password(value) if isinstance(value, str) else value for knob, value in run.config.items()}
    return {
        "name": run.name, "config": config, "missing": run.missing, "curves": curves(run), "tree": tree,
        "index": index, "I_star": run.summary.get("I_star"),
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
