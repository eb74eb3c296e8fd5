import re
from itertools import combinations

from labs.lab6 import advised

__all__ = ["diagnose", "predicted", "propose", "choose_joining"]

predicted = 0.1  # a guess


def diagnose(text):
    """Each symptom has a sign of its own in another tag; none of them needs the right answer."""
    queries, results, answers = (
        re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
        for tag in ("search", "information", "answer")
    )
    answer = answers[-1].strip() if answers else ""
    found = set()
    if any(query.split().count("of") > 1 for query in queries):
        found.add("entity")
    if len(answer.split()) > 2:
        found.add("exact")
    if answer and answer not in " ".join(results):
        found.add("state")
    return found


def propose(instruction, counts, n):
    """The frequent symptoms come first: two of them together, all three, each alone. Verification
    chooses; a proposer that knew the best one would need none."""
    names = sorted(counts, key=lambda name: -counts[name])
    sets = [some for size in (2, 3, 1) for some in combinations(names, size)]
    texts = [advised(instruction, some) for some in sets]
    return list(dict.fromkeys(texts))[:n]


def choose_joining(verified, room):
    """Equals join: on few questions a tie says little, and a revision brings variety."""
    return [c for c in verified if c.r >= c.r_parent][:room]
