"""A sample of a run's trajectories: an index that a page can filter, and the rows themselves."""

import gzip
import json
import math
from contextlib import suppress
from pathlib import Path

from extras.page.read import Run
from plumbing.files import Row

COLUMNS = "page place kind t ins reward failed stop source calls question group".split()
SHOWN = "prediction golds metrics advantage action_tokens".split()


def sample_trajectories(run: Run, tree: Row, limit: int) -> tuple[Row, Row]:
    """Returns (index, pages) of at most about `limit` trajectories of training, and of all that
    were kept to compare.

    index: {"columns", "questions", "rows", "all"}; a row has COLUMNS, and `ins` is an
    instruction's id, or "r" and the place of a refused candidate in the tree. pages: the shown
    rows of a file, by its name.
    """
    # steps give a part, verifications and evaluations all
    index: Row = {"columns": COLUMNS, "rows": [], "all": 0}
    pages: Row = {}
    questions: dict[str, int] = {}
    files = sorted((run.path / "trajectories").glob("*.jsonl.gz"))
    steps = sum(file.name.startswith("step") for file in files)

    # each file is a page
    for file in files:
        rows = read_rows(file)
        index["all"] += len(rows)
        if file.name.startswith("step"):
            rows = cut_groups(rows, math.ceil(limit / steps))
        shown = []
        for place, row in enumerate(rows):
            entry = describe_row(row, file.name.removesuffix(".jsonl.gz"), tree, run)
            entry["question"] = questions.setdefault(row["question_text"], len(questions))
            entry |= {"page": len(pages), "place": place}
            index["rows"].append([entry[name] for name in COLUMNS])
            told = {key: row[key] for key in SHOWN if key in row}
            shown.append(told | {"parts": split_response(row)})
        pages[file.name] = shown
    return index | {"questions": list(questions)}, pages


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of a file; those before its end where a kill has cut it."""
    rows = list[Row]()
    with suppress(EOFError, ValueError), gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            rows.append(json.loads(line))
    return rows


def cut_groups(rows: list[Row], limit: int) -> list[Row]:
    """Returns the first `limit` rows, and the rest of the last one's group."""
    while 0 < limit < len(rows) and rows[limit]["group"] == rows[limit - 1]["group"]:
        limit += 1
    return rows[:limit]


def describe_row(row: Row, name: str, tree: Row, run: Run) -> Row:
    """Returns a row of the index without its places; `name`: of the file."""
    file, *numbers = name.split("-")
    ins = str(row["instruction"])
    if file == "step":
        kind, t = "training", int(numbers[0])
    elif file == "verify":
        kind, t = "verification", int(numbers[0])
        if row["candidate"]:
            ins = tree["candidates"].get(f"{t}.{int(numbers[1])}.{row['candidate']}", "?")
    else:
        kind = row["setting"]
        t = run.config["T"] if kind.startswith("trained policy") else 0
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
