"""The family tree of a run's instructions: who was born when, of whom, why it left, and who was refused."""

from __future__ import annotations

import re
from typing import Any

from page.read import Row, Run, number

EXAMPLE = re.compile(r"<example>\n(?:Response: )?(.*?)(?:\nCorrect answer: (.*?))?\n</example>", re.S)
BLOCKS = re.compile(r"<ins_\d+>.*?(?:</ins_\d+>|\Z)", re.S)


def family(run: Run) -> Row:
    """Returns {"instructions", "refused", "calls"}: lists for the tree, and the optimizer's calls by "step.round".

    An instruction's `history` has [t, w, p, n] of every step in which it was in P: weight, probability, trajectories;
    `rated` is its latest rating in words, where the run has ratings, and `intervals` [t, low, high] of those that are
    estimates of the weight; `undecided` the steps at which a test could not tell it from the leader.
    """
    found = _instructions(run)
    _history(run, found)
    calls, refused = _calls(run), []
    born: dict[tuple[int, str], Row] = {(I["born"], I["text"]): I for I in found.values()}
    for row in run.reflections:
        t, place = int(row["t"]), f"{int(row['t'])}.{row.get('round', 0)}"
        parent = {"parents": [row["parent"]] if isinstance(row.get("parent"), int) else [], "t": t, "call": place}
        for rejected in _dicts(row.get("rejected")):
            refused.append(parent | {"text": str(rejected.get("text", "")), "why": str(rejected.get("reason", ""))})
        verified = _dicts(row.get("verified"))
        for c in verified:
            text, n = str(c.get("text", "")), len(row.get("D_B") or [])
            scores = {"r": number(c.get("r")), "r_parent": number(c.get("r_parent")), "questions": n}
            if joined := born.get((t, text)):
                joined |= scores | {"call": place}
            else:
                refused.append(parent | scores | {"text": text, "why": _why_refused(c)})
        for text in row.get("accepted") or []:
            if joined := born.get((t, str(text))):
                joined.setdefault("call", place)
    for I in found.values():  # what nobody verified: whose reply holds it
        here = [p for p in calls if p.startswith(f"{I['born']}.") and I["text"] in calls[p]["reply"]]
        if here and I["parents"]:
            I.setdefault("call", here[0])
    return {"instructions": list(found.values()), "refused": refused, "calls": calls}


def _instructions(run: Run) -> dict[int, Row]:
    """Returns every instruction that was ever in P, by id."""
    found: dict[int, Row] = {}
    before: set[int] = set()
    for event in run.events:
        t, now = int(event["t"]), {I["id"] for I in event["P"]}
        for I in event["P"]:
            if I["id"] not in found:
                found[I["id"]] = {
                    "id": I["id"], "text": str(I.get("text", "")), "parents": _parents(I),
                    "born": int(number(I.get("born")) or 0), "left": None, "why": "", "history": [],
                    "intervals": [], "rated": "", "undecided": [],
                }  # fmt: skip
        for j in undecided_of(event):
            if j in found:
                found[j]["undecided"].append(t)
        for j in before - now:
            found[j] |= {"left": t, "why": "pruned" if event.get("event") == "prune" else "succeeded"}
        before = now
    return found


def undecided_of(event: Row) -> list[int]:
    """Returns the ids that a pruning kept because a test could not tell them from the leader."""
    ids = event.get("undecided") if event.get("event") == "prune" else None
    return [j for j in ids if isinstance(j, int)] if isinstance(ids, list) else []


def _parents(I: Row) -> list[int]:
    """Returns the ids of the instructions that I revises."""
    parents = I.get("parents") or [I.get("parent"), I.get("other")]
    return [j for j in (parents if isinstance(parents, list) else [parents]) if isinstance(j, int)]


def _history(run: Run, found: dict[int, Row]) -> None:
    for row in run.steps:
        w, p, n = (_object(row.get(name)) for name in ("w", "p", "n"))
        for j, value in w.items():
            if str(j).isdigit() and int(j) in found:
                count = n.get(j, 0) if n else None
                found[int(j)]["history"].append([int(row["t"]), number(value), number(p.get(j)), number(count)])
        name, on_w, of = _rating(row)
        for id, (x, half) in of.items():
            if id in found:
                found[id]["rated"] = f"{x:.4g} ± {half:.4g} {name}"
                found[id]["intervals"] += [[int(row["t"]), round(x - half, 4), round(x + half, 4)]] if on_w else []


def _rating(row: Row) -> tuple[str, bool, dict[int, tuple[float, float]]]:
    """Returns how a step rated, whether in units of w, and by id (estimate, half width of its interval)."""
    rating = _object(row.get("rating"))
    old = "of" not in rating  # it was {id: [estimate of w, standard error]}
    of = {}
    for j, entry in (rating if old else _object(rating["of"])).items():
        x, half = (number(value) for value in entry) if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if str(j).isdigit() and x is not None and half is not None:
            of[int(j)] = x, 1.96 * half if old else half
    return ("(95 %)", True, of) if old else (str(rating.get("name", "")), bool(rating.get("on_w")), of)


def _why_refused(c: Row) -> str:
    if c.get("why"):
        return str(c["why"])
    r, r_parent = number(c.get("r")), number(c.get("r_parent"))
    return "below its parent" if r is not None and r_parent is not None and r < r_parent else "no place was left"


def _calls(run: Run) -> dict[str, Row]:
    """Returns what was sent to the optimizer and what it replied, by "step.round"."""
    found = {}
    for row in run.reflections:
        if isinstance(call := row.get("call"), dict):
            prompt, reply = str(call.get("prompt", "")), str(call.get("reply", ""))
            failures = [{"text": text, "gold": gold} for text, gold in EXAMPLE.findall(prompt)]
            found[f"{int(row['t'])}.{row.get('round', 0)}"] = {
                "prompt": prompt, "reply": reply, "failures": failures, "analysis": BLOCKS.sub("", reply).strip(),
                "prompt_tokens": number(call.get("prompt_tokens")), "seconds": number(call.get("seconds")),
                "completion_tokens": number(call.get("completion_tokens")),
            }  # fmt: skip
    return found


def _object(x: Any) -> Row:
    return x if isinstance(x, dict) else {}


def _dicts(rows: Any) -> list[Row]:
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def lineage(instructions: list[Row], id: int) -> list[int]:
    """Returns the ids from a first instruction to `id`, along first parents."""
    by_id, line = {I["id"]: I for I in instructions}, [id]
    while (parents := by_id.get(line[0], {}).get("parents")) and parents[0] not in line:
        line.insert(0, parents[0])
    return line
