"""The family tree of a run's instructions: when each was born, of which parent, why it left, and
what was refused."""

import re

from extras.page.read import Run
from plumbing.files import Row
from reflect import read_blocks

EXAMPLE = re.compile(
    r"<example>\n(?:Response: )?(.*?)(?:\nCorrect answer: (.*?))?\n</example>", re.S
)
BLOCKS = re.compile(r"<ins_\d+>.*?(?:</ins_\d+>|\Z)", re.S)


def collect_family(run: Run) -> Row:
    """Collects "instructions" and "refused" for the tree, the optimizer's "calls" by "step.round",
    and "candidates".

    An instruction's `history` has [t, w, p, n] of every step in which it was in P: weight,
    probability, trajectories. `candidates` names what was verified, by "step.round.k" for the k-th
    accepted from a reply: an instruction's id, or "r" and the place of one that was refused.
    """
    instructions = _instructions(run)
    born = {(I["born"], I["text"]): I for I in instructions.values()}
    refused = []
    calls = {}
    blocks = {}  # of its reply
    accepted = {}  # the step and the text of each candidate
    for row in run.reflections:
        t = row["t"]
        place = f"{t}.{row.get('round', 0)}"
        child = {"parents": [row.get("parent")], "t": t, "call": place}
        if "call" in row:
            call = row["call"]
            calls[place] = _call(call)
            blocks[place] = read_blocks(call["reply"])
        reply = dict(enumerate(blocks.get(place, ()), 1))

        # what the checks said of each text of the reply
        for k, number in enumerate(row.get("accepted", ()), 1):
            text = reply.get(number, "")
            accepted[f"{place}.{k}"] = t, text
            if (t, text) in born:
                born[t, text]["call"] = place
        for c in row.get("rejected", ()):
            refused.append(child | {"text": reply.get(c["k"], ""), "why": c["reason"]})

        # what verification said of those that were accepted
        for c in row.get("verified", ()):
            scores = {"r": c["r"], "r_parent": c["r_parent"], "questions": len(row["D_B"])}
            if (t, c["text"]) in born:
                born[t, c["text"]] |= scores
            else:
                gate = run.config.get("gate", 1)
                below = gate and c["r"] < c["r_parent"]
                why = "below its parent" if below else "no place was left"
                refused.append(child | scores | {"text": c["text"], "why": why})

    names = {key: str(I["id"]) for key, I in born.items()}
    for j, c in enumerate(refused):
        names.setdefault((c["t"], c["text"]), f"r{j}")
    candidates = {place: names.get(key, "?") for place, key in accepted.items()}
    return {
        "instructions": list(instructions.values()),
        "refused": refused,
        "calls": calls,
        "candidates": candidates,
    }


def _instructions(run: Run) -> dict[int, Row]:
    """Every instruction that was ever in P, by id."""
    # when each came, of which parent, and when it went
    out: dict[int, Row] = {}
    before: set[int] = set()
    for event in run.events:
        why = "pruned" if event["event"] == "prune" else "succeeded"
        now = {I["id"]: I for I in event["P"]}
        for id in before - now.keys():
            out[id] |= {"left": event["t"], "why": why}
        for id in now.keys() - out.keys():
            I = now[id]
            parents = [] if I["parent"] is None else [I["parent"]]
            if parents and parents[0] >= id:
                raise ValueError(f"instruction {id} is its own ancestor")
            out[id] = {"id": id, "text": I["text"], "parents": parents, "born": I["born"]}
            out[id] |= {"left": None, "why": "", "history": []}
        before = set(now)

    # what each step gave it
    for row in run.steps:
        for id, w in row.get("w", {}).items():
            I = out.get(int(id))
            if I:
                I["history"].append([row["t"], w, row["p"].get(id), row["n"].get(id, 0)])
    return dict(sorted(out.items()))


def _call(call: Row) -> Row:
    """What was sent to the optimizer and what it replied."""
    keys = ("prompt", "reply", "prompt_tokens", "completion_tokens", "seconds")
    shown = {key: call[key] for key in keys}
    examples = EXAMPLE.findall(call["prompt"])
    shown["failures"] = [{"text": text, "gold": gold} for text, gold in examples]
    shown["analysis"] = BLOCKS.sub("", call["reply"]).strip()
    return shown
