"""The family tree of a run's instructions: when each was born, of which parent, why it left, and
what was refused."""

import re
from typing import Any

from page.read import Row, Run
from reflect import read_blocks

EXAMPLE = re.compile(
    r"<example>\n(?:Response: )?(.*?)(?:\nCorrect answer: (.*?))?\n</example>", re.S
)
BLOCKS = re.compile(r"<ins_\d+>.*?(?:</ins_\d+>|\Z)", re.S)


def family(run: Run) -> Row:
    """Collects "instructions" and "refused" for the tree, the optimizer's "calls" by "step.round",
    and "candidates".

    An instruction's `history` has [t, w, p, n] of every step in which it was in P: weight,
    probability, trajectories. `candidates` names what was verified, by "step.round.k" for the k-th
    accepted from a reply: an instruction's id, or "r" and the place of one that was refused.
    """
    instructions, refused, calls, texts = (
        _instructions(run),
        list[Row](),
        dict[str, Row](),
        dict[str, list[str]](),
    )
    born = {(I["born"], I["text"]): I for I in instructions.values()}
    for row in run.reflections:
        t, place = row["t"], f"{row['t']}.{row.get('round', 0)}"
        child = {"parents": [row.get("parent")], "t": t, "call": place}
        if "call" in row:
            calls[place] = _call(row["call"])
        reply = dict(enumerate(read_blocks(calls[place]["reply"]), 1)) if place in calls else {}
        if "accepted" in row:
            texts[place] = [reply.get(k, "") for k in row["accepted"]]
        for text in texts.get(place, []):
            if (t, text) in born:
                born[t, text]["call"] = place
        refused += [
            child | {"text": reply.get(c["k"], ""), "why": c["reason"]}
            for c in row.get("rejected", ())
        ]
        for c in row.get("verified", ()):
            scores = {"r": c["r"], "r_parent": c["r_parent"], "questions": len(row["D_B"])}
            if (t, c["text"]) in born:
                born[t, c["text"]] |= scores
            else:
                why = "below its parent" if c["r"] < c["r_parent"] else "no place was left"
                refused.append(child | scores | {"text": c["text"], "why": why})
    names = {(c["t"], c["text"]): f"r{j}" for j, c in reversed(list(enumerate(refused)))}
    names |= {key: str(I["id"]) for key, I in born.items()}
    candidates = {
        f"{place}.{k}": names.get((int(place.partition(".")[0]), text), "?")
        for place, of_round in texts.items()
        for k, text in enumerate(of_round, 1)
    }
    return {
        "instructions": list(instructions.values()),
        "refused": refused,
        "calls": calls,
        "candidates": candidates,
    }


def _instructions(run: Run) -> dict[int, Row]:
    """Every instruction that was ever in P, by id."""
    out: dict[int, Row] = {}
    before: set[int] = set()
    for event in run.events:
        now = {I["id"]: I for I in event["P"]}
        for id in before - now.keys():
            out[id] |= {
                "left": event["t"],
                "why": "pruned" if event["event"] == "prune" else "succeeded",
            }
        for id in now.keys() - out.keys():
            parents = [now[id]["parent"]] if now[id]["parent"] is not None else []
            out[id] = {
                "id": id,
                "text": now[id]["text"],
                "parents": parents,
                "born": now[id]["born"],
            }
            out[id] |= {"left": None, "why": "", "history": []}
        before = set(now)
    for row in run.steps:
        for id, w in row.get("w", {}).items():
            if int(id) in out:
                out[int(id)]["history"].append([row["t"], w, row["p"].get(id), row["n"].get(id, 0)])
    return dict(sorted(out.items()))


def _call(call: Row) -> Row:
    """What was sent to the optimizer and what it replied."""
    keys = ("prompt", "reply", "prompt_tokens", "completion_tokens", "seconds")
    kept: dict[str, Any] = {key: call[key] for key in keys}
    failures = [{"text": text, "gold": gold} for text, gold in EXAMPLE.findall(call["prompt"])]
    return kept | {"failures": failures, "analysis": BLOCKS.sub("", call["reply"]).strip()}
