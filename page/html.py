"""One self-contained HTML file: the template with its style, its scripts, the data and the
compressed pages."""

import base64
import hashlib
import html
import re
import time
from collections.abc import Sequence
from pathlib import Path

from page.curves import collect_curves, group_runs
from page.family import collect_family
from page.read import Run, read_run
from page.sample import compress_json, encode_json, sample_trajectories
from page.verdict import judge_run
from plumbing import files
from plumbing.faults import Fault
from plumbing.files import Row
from plumbing.outside import map_texts, without_secrets

STATIC = Path(__file__).parent / "static"
SCRIPTS = (
    "vendor/uPlot.iife.min.js dom.js state.js diff.js charts.js first.js tree.js trajectories.js trajectory.js cost.js "
    "main.js"
).split()
STYLES = ("vendor/uPlot.min.css", "style.css")
LIMIT = 1000  # trajectories of training, divided among the runs


def build_page(paths: Sequence[Path], live: str = "") -> str:
    """Makes the page of these runs as HTML; Fault if one of the paths holds no run, or what no run
    writes.

    live: the server's stamp of their files; the page reloads when it changes.
    """
    runs = [read_run(path) for path in paths]
    described = []
    pages: dict[str, str] = {}
    try:
        for k, run in enumerate(runs):
            about, more = describe_run(run, max(1, LIMIT // len(runs)))
            described.append(about)
            pages |= {f"{k}/{name}": text for name, text in more.items()}
        data = {
            "runs": described,
            "groups": group_runs(runs),
            "live": live,
            "made": time.time(),
            "pages": list(pages),
        }
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise Fault(
            f"{run.path} holds what no run writes ({type(e).__name__}: {e}): "
            "restore it, or take the commit in its config.json"
        ) from e
    return fill_template(data, pages)


def write_page(runs: Sequence[Path], to: Path) -> Path:
    """Writes the page of these runs into a file, atomically, and returns its path; Fault if it
    cannot."""
    files.write_file(to, build_page(runs))
    return to


def describe_run(run: Run, limit: int) -> tuple[Row, dict[str, str]]:
    """Returns (what the page knows of a run at once, what it opens later: name -> compressed
    text)."""
    tree = collect_family(run)
    index, pages = sample_trajectories(run, tree, limit)
    pages["calls"] = compress_json(tree.pop("calls"))
    del tree["candidates"]
    data = {
        "name": run.name,
        "config": map_texts(run.config, without_secrets),
        "missing": run.missing,
        "curves": collect_curves(run),
        "tree": tree,
        "index": index,
        "metric": run.metrics[0],
        "metrics": run.metrics,
        "tools": run.tools,
        "evolutions": [event["t"] for event in run.events if event["event"] == "evolve"],
    }
    return data | judge_run(run, tree), pages


def fill_template(data: Row, pages: dict[str, str]) -> str:
    """Fills the template. The data cannot end their element or run: they hold no `<`, and a script
    needs its hash."""
    script = ""
    for name in SCRIPTS:
        script += f"\n// ---- {name}\n{(STATIC / name).read_text('utf-8').strip()}\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    blocks = [
        f'<script type="text/plain" id="page-{k}">{text}</script>'
        for k, text in enumerate(pages.values())
    ]
    values = {
        "digest": digest,
        "title": html.escape(" · ".join(run["name"] for run in data["runs"])),
        "style": "\n".join((STATIC / name).read_text("utf-8").strip() for name in STYLES),
        "script": script, "data": embed_json(data), "pages": "\n".join(blocks),
        "license": html.escape((STATIC / "vendor" / "uPlot.LICENSE").read_text("utf-8").replace("--", "- -")),
    }  # fmt: skip
    template = (STATIC / "index.html").read_text("utf-8")
    # In one pass: what is filled in is never looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda name: values[name[1]], template)


def embed_json(x: object) -> str:
    """x as JSON that is safe inside a script element."""
    return encode_json(x).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028")
