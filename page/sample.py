"""A sample of a run's trajectories: an index that a page can filter, and the rows themselves in compressed pages."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from pathlib import Path

from page.read import Row, Run, finite, number, parse_lines

STEP, VERIFY = re.compile(r"step-(\d+)\.jsonl\.gz"), re.compile(r"verify-(\d+)-(\d+)\.jsonl\.gz")
COLUMNS = "page place kind t ins reward failed stop source calls question group tokens".split()


def sample(run: Run, tree: Row, limit: int) -> tuple[Row, dict[str, str]]:
    """Returns (index, pages) of at most about `limit` trajectories of training, and of all that were kept to compare.

    index: {"questions", "sources", "stops", "settings", "rows", "seen", "all"}; a row has COLUMNS, and `ins` is an
    instruction's id, or "r" and the place of a refused candidate in the tree. pages: name -> gzip in base64.
    """
    index: Row = {"columns": COLUMNS, "questions": [], "rows": [], "seen": 0, "all": 0}
    pages: dict[str, str] = {}
    files = sorted((run.path / "trajectories").glob("*.jsonl.gz"))
    steps = [file for file in files if STEP.fullmatch(file.name)]
    a_step = max(1, math.ceil(limit / max(1, len(steps))))
    steps = steps[:: max(1, math.ceil(len(steps) / max(1, limit)))]
    questions: dict[str, int] = {}
    for file in files:
        if STEP.fullmatch(file.name) and file not in steps:
            continue
        rows, in_all, damaged = _rows(file, a_step if file in steps else 10**9)
        index["all"] += in_all
        if damaged:
            run.missing.append(f"trajectories/{file.name} is cut short or damaged: what could be read is shown.")
        shown: list[Row] = []
        for row in rows:
            if entry := _entry(row, file.name, tree, run):
                text = str(row.get("question_text") or row.get("question", "?"))
                entry["question"] = questions.setdefault(text, len(questions))
                entry |= {"page": len(pages), "place": len(shown)}
                index["rows"].append([entry[name] for name in COLUMNS])
                shown.append(_shown(row))
        if shown:
            pages[file.name.removesuffix(".jsonl.gz")] = pack(shown)
    index["questions"] = list(questions)
    index["seen"] = len(index["rows"])
    if not files:
        run.missing.append("trajectories/ is empty: no trajectory can be shown.")
    elif steps and not any(row[COLUMNS.index("tokens")] for row in index["rows"]):
        run.missing.append("No trajectory has the data of its tokens (--token_rows 0, or an older run).")
    return index, pages


def pack(x: object) -> str:
    """Returns x as JSON, gzip, base64."""
    text = json.dumps(finite(x), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode()


def _rows(file: Path, limit: int) -> tuple[list[Row], int, bool]:
    """Returns about `limit` rows of a file, whole groups, those with data of their tokens first; how many it holds."""
    lines: list[str] = []
    damaged = False
    try:
        with gzip.open(file, "rt", errors="replace") as stream:
            for line in stream:
                lines.append(line)
    except (OSError, EOFError):
        damaged = True
    watched = ['"token_data": {"' in line for line in lines]
    order = sorted(range(len(lines)), key=lambda k: not watched[k])  # stable: groups stay together
    rows, bad = parse_lines("\n".join(lines[k] for k in order[: limit + 64]))
    cut = limit
    while 0 < cut < len(rows) and rows[cut].get("group") == rows[cut - 1].get("group"):
        cut += 1
    return rows[:cut], len(lines), damaged or bad > 0


def _entry(row: Row, name: str, tree: Row, run: Run) -> Row | None:
    """Returns a row of the index without its places; None if it is no trajectory."""
    if number(row.get("reward")) is None or not isinstance(row.get("response"), str):
        return None
    turns = [turn for turn in row.get("turns") or [] if isinstance(turn, dict)]
    failed = row.get("failed")
    entry: Row = {
        "reward": round(row["reward"], 4), "stop": str(row.get("stop", "")), "source": str(row.get("source", "")),
        "failed": int(failed if isinstance(failed, bool) else row["reward"] < 1),  # older runs know no other failure
        "calls": sum(bool(turn.get("tool")) and turn.get("result") is not None for turn in turns),
        "group": number(row.get("group")) or 0, "tokens": int(isinstance(row.get("token_data"), dict)),
    }  # fmt: skip
    if match := STEP.fullmatch(name):
        return entry | {"kind": "training", "t": int(match[1]), "ins": _id(row.get("instruction"))}
    if match := VERIFY.fullmatch(name):
        t = int(match[1])
        return entry | {"kind": "verification", "t": t, "ins": _verified(row, t, int(match[2]), tree, run)}
    setting = str(row.get("setting", "held out"))
    ids = run.summary.get("generations") or [0]
    ins = ids[-1] if "I_star" in setting else ids[0]
    return entry | {"kind": setting, "t": 0 if setting.startswith("first policy") else run.T, "ins": str(ins)}


def _verified(row: Row, t: int, turn: int, tree: Row, run: Run) -> str:
    """Returns which instruction a rollout of a verification was played under."""
    k = row.get("candidate", row.get("instruction"))  # in older runs `instruction` counts the candidates
    if not k:
        return _id(row.get("parent", row.get("instruction") if "candidate" in row else 0))
    accepted = [r["accepted"] for r in run.reflections if r["t"] == t and r.get("round") == turn and "accepted" in r]
    text = accepted[-1][k - 1] if accepted and isinstance(k, int) and k <= len(accepted[-1]) else None
    for I in tree["instructions"]:
        if I["born"] == t and I["text"] == text:
            return str(I["id"])
    places = [j for j, c in enumerate(tree["refused"]) if c["t"] == t and c["text"] == text]
    return f"r{places[0]}" if places else "?"


def _id(x: object) -> str:
    """Returns an instruction's id as the page names it."""
    return str(x) if isinstance(x, int) else "?"


def _shown(row: Row) -> Row:
    """Returns what the page shows of a trajectory."""
    keys = ("prediction", "golds", "metrics", "advantage", "invalid", "prompt_tokens", "action_tokens", "token_data")
    return {key: row[key] for key in keys if key in row} | {"parts": parts(row)}


def parts(row: Row) -> list[list[str]]:
    """Returns a response as [["act", text], ["obs", text], ...]: what the policy wrote, and what it was shown."""
    response, out, place = row["response"], [], 0
    for turn in row.get("turns") or []:
        text = str(turn.get("text", "")) if isinstance(turn, dict) else ""
        found = response.find(text, place) if text else -1
        if found < 0:
            continue
        if response[place:found].strip():
            out.append(["obs", response[place:found]])
        out.append(["act", text])
        place = found + len(text)
    if response[place:].strip():
        out.append(["obs" if out else "act", response[place:]])
    return out
