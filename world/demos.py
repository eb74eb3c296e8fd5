"""Demonstrations: how an agent behaves that does what its instruction says, with noise.

What an instruction leaves unsaid falls back on poor habits: one search with the whole question, no notes, a
sentence for an answer, stopping one fact early. These habits are what the paper's static baseline shows
(one search that mirrors the question, App. F) and what evolution has to talk the policy out of.
"""

import random

from rollout import observation
from world.clauses import BEST, write
from world.facts import RELATIONS, Asked, World

# How often the agent does the right thing: with the clause, against it, and with nothing said.
OBEY = {
    "entity": {"entity": 0.96, "whole": 0.04, "memory": 0.02, None: 0.10},
    "state": {"state": 0.97, "terse": 0.02, None: 0.15},
    "exact": {"exact": 0.98, "verbose": 0.02, None: 0.45},
    "full": {"cont": 0.99, "early": 0.02, None: 0.20},
    "plan": {"plan": 0.97, None: 0.03},
}
MISREAD = 0.30  # an agent that writes no note takes its fact from a look-alike passage this often


def random_clauses(rng: random.Random) -> list[str]:
    """A random set of clauses, never all of BEST."""
    while True:
        chosen = [
            rng.choices(["entity", "whole", "memory", None], [0.58, 0.15, 0.05, 0.22])[0],
            rng.choices(["state", "terse", None], [0.50, 0.12, 0.38])[0],
            rng.choices(["exact", "verbose", None], [0.50, 0.15, 0.35])[0],
            rng.choices(["cont", "early", None], [0.45, 0.17, 0.38])[0],
            rng.choices(["plan", None], [0.3, 0.7])[0],
        ]
        clauses = [c for c in chosen if c]
        if not set(clauses) >= BEST:
            return clauses


def demonstrate(rng: random.Random, world: World, q: Asked, clauses: list[str], k: int = 3):
    """A whole response as [(text, written by the agent?)], following the clauses."""

    def does(habit: str) -> bool:
        said = next((c for c in clauses if c in OBEY[habit]), None)
        return rng.random() < OBEY[habit][said]

    by_entity, notes, bare, full, plan = (does(h) for h in OBEY)
    from_memory = not by_entity and rng.random() < (0.95 if "memory" in clauses else 0.02)
    hops = len(q.chain)
    if not full:
        hops = max(1, hops - 1)

    parts = [("<think>" + (" steps: " + ", ".join(q.chain) if plan else "") + "</think>", True)]

    def search(query: str) -> list[str]:
        passages = world.search(query, k)
        parts.append((f"<search>{query}</search>", True))
        parts.append((observation(passages), False))
        return passages

    def read_fact(passages: list[str], name: str, relation: str) -> str:
        fact = world.facts[name, relation]
        if notes:
            parts.append((f"<think>{relation} of {name} is {fact}</think>", True))
        elif rng.random() < MISREAD:
            titles = [p.split('"')[1] for p in passages]
            others = [world.facts[t, relation] for t in titles if t != name and (t, relation) in world.facts]
            fact = rng.choice(others or [fact])
        return fact

    answer_kind = RELATIONS[q.chain[-1]][1]
    if from_memory:
        answer = rng.choice(world.names[answer_kind])
    elif by_entity:
        answer = q.path[0]
        for relation in q.chain[:hops]:
            answer = read_fact(search(f"{relation} of {answer}"), answer, relation)
    else:  # one search with the whole question: enough for one hop, a guess for more
        passages = search(q.text)
        answer = read_fact(passages, q.path[0], q.chain[0])
        if len(q.chain) > 1:
            text = " ".join(passages)
            seen = [name for name in world.names[answer_kind] if name in text]
            answer = rng.choice(seen or [answer])
    parts.append((f"<answer>{answer if bare else 'it is ' + answer}</answer>", True))
    return parts


def demo(rng: random.Random, worlds: list[World], hops: list[int], k: int = 3):
    """(instruction, question, parts): one line of the supervised data."""
    world = rng.choice(worlds)
    clauses = random_clauses(rng)
    q = world.random_question(rng, rng.choice(hops))
    return write(rng, clauses, rng.randint(0, 2)), q.text, demonstrate(rng, world, q, clauses, k)
