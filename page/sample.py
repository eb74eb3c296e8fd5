"""A sample of a run's trajectories: an index that a page can filter, and the rows themselves in
compressed pages."""

import base64
import gzip
import json
import math
import zlib
from pathlib import Path

from page.read import Run
from plumbing.files import Row, parse_lines
from plumbing.outside import finite

GROUP = 64  # trajectories of a group, at most
COLUMNS = "page place kind t ins reward failed stop source calls question group".split()
SHOWN = "prediction golds metrics advantage action_tokens".split()


def sample_trajectories(run: Run, tree: Row, limit: int) -> tuple[Row, dict[str, str]]:
    """Returns (index, pages) of at most about `limit` trajectories of training, and of all that
    were kept to compare.

    index: {"columns", "questions", "rows", "all"}; a row has COLUMNS, and `ins` is an
    instruction's id, or "r" and the place of a refused candidate in the tree. pages: name -> gzip
    in base64.
    """
    # steps give a part, verifications and evaluations all
    index: Row = {"columns": COLUMNS, "rows": [], "all": 0}
    pages: dict[str, str] = {}
    questions: dict[str, int] = {}
    folder = run.path / "trajectories"
    steps = sorted(folder.glob("step-*.jsonl.gz"))
    others = [*sorted(folder.glob("test-*.jsonl.gz")), *sorted(folder.glob("verify-*.jsonl.gz"))]
    of_step = math.ceil(limit / max(1, len(steps)))

    # each file is a page
    for file in [*steps, *others]:
        rows, in_all, damaged = _rows(file, of_step if file in steps else 10**9)
        index["all"] += in_all
        if damaged:
            run.missing.append(
                f"trajectories/{file.name} is cut short or damaged: what could be read is shown."
            )
        shown = []
        for place, row in enumerate(rows):
            entry = _entry(row, file.name, tree, run.T)
            entry["question"] = questions.setdefault(row["question_text"], len(questions))
            entry |= {"page": len(pages), "place": place}
            index["rows"].append([entry[name] for name in COLUMNS])
            shown.append(
                {key: row[key] for key in SHOWN if key in row} | {"parts": split_response(row)}
            )
        if rows:
            pages[file.name.removesuffix(".jsonl.gz")] = compress_json(shown)
    if not index["rows"]:
        run.missing.append("trajectories/ is empty: no trajectory can be shown.")
    return index | {"questions": list(questions)}, pages


def encode_json(x: object) -> bytes:
    """x as JSON."""
    text = json.dumps(finite(x), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def compress_json(x: object) -> str:
    """x as JSON, gzip, base64."""
    return base64.b64encode(gzip.compress(encode_json(x), 9, mtime=0)).decode()


def _rows(file: Path, limit: int) -> tuple[list[Row], int, bool]:
    """About `limit` rows of a file, whole groups; how many lines the file has, and whether it is damaged."""
    lines, damaged = list[str](), False
    try:
        with gzip.open(file, "rt", encoding="utf-8", errors="replace") as stream:
            lines.extend(stream)
    except (OSError, EOFError, zlib.error):
        damaged = True
    read = lines[: limit + GROUP]
    rows = parse_lines(read, "response")
    damaged |= len(rows) < len(read)
    while 0 < limit < len(rows) and rows[limit]["group"] == rows[limit - 1]["group"]:
        limit += 1
    return rows[:limit], len(lines), damaged


def _entry(row: Row, name: str, tree: Row, T: int) -> Row:
    """A row of the index without its places; `name`: of the file."""
    file, *numbers = name.removesuffix(".jsonl.gz").split("-")
    ins = str(row["instruction"])
    if file == "step":
        kind, t = "training", int(numbers[0])
    elif file == "verify":
        kind, t = "verification", int(numbers[0])
        if row["candidate"]:
            ins = tree["candidates"].get(f"{t}.{int(numbers[1])}.{row['candidate']}", "?")
    else:
        kind = row["setting"]
        t = T if kind.startswith("trained policy") else 0
    return {
        "kind": kind,
        "t": t,
        "ins": ins,
        "reward": round(row["reward"], 4),
        "failed": row["failed"],
        "stop": row["stop"],
        "source": row["source"],
        "calls": sum(bool(turn["tool"]) and turn["result"] is not None for turn in row["turns"]),
        "group": row["group"],
    }


def split_response(row: Row) -> list[list[str]]:
    """A response as [["act", text], ["obs", text], ...]: what the policy wrote, and what it was
    shown."""
    rest, out = row["response"], []
    for text in (turn["text"] for turn in row["turns"]):
        if text and text in rest:
            shown, _, rest = rest.partition(text)
            if shown.strip():
                out.append(["obs", shown])
            out.append(["act", text])
    if rest.strip():
        out.append(["obs" if out else "act", rest])
    return out
