"""Demonstrations of an agent that follows its instruction, with noise.

Where the instruction is silent, the agent falls back on poor habits: one search with the whole
question, no notes, a sentence as the answer, stopping one fact early. The paper's static baseline
shows such a habit (one search that mirrors the question, App. F). Evolution has to overcome them,
all but the last: that one is reinforcement's.
"""

import random
from collections.abc import Sequence

from config import PRESETS, Config
from extras.world.facts import RELATIONS, Asked, World
from tasks.search_qa import SearchQA
from world.clauses import write_instruction

# formats prompts, results and messages; nobody starts its server
TASK = SearchQA(Config(**PRESETS["world"]))
SEARCH = TASK.search
Choices = Sequence[tuple[Sequence[str | None], Sequence[float]]]

# Probability of the right behaviour under the clause, under one that contradicts it, and under
# neither (None).
#
# Two of them make the world. An agent that was not told to search for single entities never does:
# without that clause reinforcement finds nothing to reward. And an agent that was told to go on to
# the last fact stops one short more often than not: no instruction makes the greedy policy go on.
# Reinforcement does, under an instruction with that clause.
OBEY = {
    "entity": {"entity": 0.96, None: 0.0},
    "state": {"state": 0.97, "terse": 0.02, None: 0.15},
    "exact": {"exact": 0.98, "verbose": 0.02, None: 0.45},
    "full": {"cont": 0.40, "early": 0.01, None: 0.15},
    "plan": {"plan": 0.97, None: 0.03},
}
# These are never demonstrated together: reinforcement and reflection have to find the combination.
BEST = frozenset({"entity", "state", "exact", "cont"})
MISREAD = 0.30  # probability that an agent without notes takes its fact from a look-alike passage


def observation(passages: list[str]) -> str:
    """Renders the passages as the policy reads them after a search."""
    return f"\n\n<{SEARCH.result_tag}>{SEARCH.show(passages)}</{SEARCH.result_tag}>\n\n"


CHOICES = (  # of each slot: clauses, or none, with their shares
    (("entity", "whole", "memory", None), (0.50, 0.25, 0.04, 0.21)),
    (("state", "terse", None), (0.50, 0.12, 0.38)),
    (("exact", "verbose", None), (0.50, 0.15, 0.35)),
    (("cont", "early", None), (0.45, 0.17, 0.38)),
    (("plan", None), (0.3, 0.7)),
)


def choose_clauses(rng: random.Random, choices: Choices, best: set[str]) -> list[str]:
    """Draws a set of clauses, never all of `best`."""
    while True:
        chosen = [rng.choices(slot, shares)[0] for slot, shares in choices]
        clauses = [c for c in chosen if c]
        if not set(clauses) >= best:
            return clauses


def choose_habits(
    rng: random.Random, obey: dict[str, dict[str | None, float]], clauses: list[str]
) -> list[bool]:
    """Draws for each habit whether the agent has it under these clauses."""
    obeyed = (next((c for c in clauses if c in habit), None) for habit in obey.values())
    return [
        rng.random() < habit[clause] for habit, clause in zip(obey.values(), obeyed, strict=True)
    ]


def demonstrate(rng: random.Random, world: World, q: Asked, clauses: list[str], k: int = 3):
    """Writes a whole response that follows the clauses, as [(text, written by the agent?)]."""
    by_entity, notes, bare, full, plan = choose_habits(rng, OBEY, clauses)
    from_memory = not by_entity and rng.random() < (0.95 if "memory" in clauses else 0.02)
    hops = len(q.chain) if full else max(1, len(q.chain) - 1)
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
            others = [
                world.facts[t, relation]
                for t in titles
                if t != name and (t, relation) in world.facts
            ]
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
            names = [name for name in world.names[answer_kind] if name in text]
            answer = rng.choice(names or [answer])
    parts.append((f"<answer>{answer if bare else 'it is ' + answer}</answer>", True))
    return parts


def demo(rng: random.Random, worlds: list[World], hops: list[int], k: int = 3):
    """Makes one supervised example: (instruction, question, parts of the response)."""
    world = rng.choice(worlds)
    clauses = choose_clauses(rng, CHOICES, BEST)
    q = world.random_question(rng, rng.choice(hops))
    return (
        write_instruction(rng, clauses, rng.randint(0, 2)),
        q.text,
        demonstrate(rng, world, q, clauses, k),
    )
