"""One self-contained HTML file: the template with its style, its scripts, the data and the
compressed pages."""

import base64
import gzip
import hashlib
import html
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from extras.page.family import collect_family
from extras.page.read import (
    Run,
    collect_curves,
    describe_gain,
    describe_winner,
    group_runs,
    read_run,
    sum_costs,
)
from extras.page.sample import sample_trajectories
from plumbing.files import Row, write_file
from plumbing.outside import finite, map_texts, without_secrets

STATIC = Path(__file__).parent / "static"
SCRIPTS = (
    "vendor/uPlot.iife.min.js dom.js state.js diff.js charts.js first.js tree.js trajectories.js trajectory.js cost.js "
    "main.js"
).split()
STYLES = ("vendor/uPlot.min.css", "style.css")
LIMIT = 1000  # trajectories of training, divided among the runs


def write_page(runs: Sequence[Path], to: Path) -> Path:
    """Writes the page of these runs into a file, atomically, and returns its path. Raises Fault."""
    write_file(to, build_page(runs))
    return to


def build_page(paths: Sequence[Path]) -> str:
    """Makes the page of these runs as HTML; Fault if one of the paths holds no run."""
    runs = [read_run(path) for path in paths]
    described = []
    pages: dict[str, str] = {}
    for k, run in enumerate(runs):
        about, more = describe_run(run, max(1, LIMIT // len(runs)))
        described.append(about)
        pages |= {f"{k}/{name}": compress_json(content) for name, content in more.items()}
    groups, made = group_runs(runs), time.time()
    data = {"runs": described, "groups": groups, "made": made, "pages": list(pages)}
    return fill_template(data, pages)


def describe_run(run: Run, limit: int) -> tuple[Row, Row]:
    """Returns (what the page knows of a run at once, what it opens later, by name)."""
    tree = collect_family(run)
    index, pages = sample_trajectories(run, tree, limit)
    pages["calls"] = tree.pop("calls")
    del tree["candidates"]
    return {
        "name": run.path.resolve().name,
        "config": map_texts(run.config, without_secrets),
        "t": run.steps[-1]["t"] if run.steps else 0,
        "T": run.config["T"],
        "finished": bool(run.summary),
        "metric": run.metrics[0] if run.metrics else "",
        "metrics": run.metrics,
        "tools": run.tools,
        "evolutions": [event["t"] for event in run.events if event["event"] == "evolve"],
        "curves": collect_curves(run),
        "tree": tree,
        "index": index,
        "learned": describe_gain(run),
        "winner": describe_winner(run, tree),
        "cost": sum_costs(run),
    }, pages


def fill_template(data: Row, pages: dict[str, str]) -> str:
    """Fills the template. The data cannot end their element or run: they hold no `<`, and a script
    needs its hash."""
    script = ""
    for name in SCRIPTS:
        script += f"\n// ---- {name}\n{(STATIC / name).read_text('utf-8').strip()}\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    blocks = []
    for k, text in enumerate(pages.values()):
        blocks.append(f'<script type="text/plain" id="page-{k}">{text}</script>')
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


def encode_json(x: object) -> str:
    return json.dumps(finite(x), ensure_ascii=False, separators=(",", ":"))


def embed_json(x: object) -> str:
    """x as JSON that is safe inside a script element."""
    return encode_json(x).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def compress_json(x: object) -> str:
    """x as JSON, gzip, base64."""
    text = encode_json(x).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(text, 9, mtime=0)).decode()
