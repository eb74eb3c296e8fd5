"""A world of films, people, cities, nations and companies: its passages, and its questions of 1, 2
and 3 hops.

Names are two invented words drawn from small pools, so that every name has look-alikes that share a
word with it: a search for one entity finds them too, at ranks 2 and 3.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from retrieval_server import BM25

RELATIONS = {  # relation: (kind of its subject, kind of its object)
    "director": ("film", "person"),
    "producer": ("film", "company"),
    "birthplace": ("person", "city"),
    "employer": ("person", "company"),
    "country": ("city", "nation"),
    "mayor": ("city", "person"),
    "founder": ("company", "person"),
    "base": ("company", "city"),
    "capital": ("nation", "city"),
}
# What questions of 2 and 3 hops ask for, from the entity that they name to the answer.
LONGER = """
director birthplace
director employer
producer founder
producer base
birthplace country
birthplace mayor
employer base
employer founder
founder birthplace
base country
director birthplace country
producer base country
founder birthplace country
employer base country
"""
CHAINS: dict[int, list[tuple[str, ...]]] = {1: [], 2: [], 3: []}  # by their hops
for line in [*RELATIONS, *LONGER.strip().splitlines()]:
    chain = tuple(line.split())
    CHAINS[len(chain)].append(chain)
OPENINGS = ["What is", "Name", "Tell me"]

# the world of the RL run
FULL = {"film": 300, "person": 400, "city": 150, "nation": 30, "company": 120}
# one of the warm start's worlds
MINI = {"film": 70, "person": 80, "city": 50, "nation": 15, "company": 40}


def words(n: int, seed: int, ending: str) -> list[str]:
    """Draws `n` distinct pronounceable words with the same ending."""
    rng = random.Random(seed)
    consonants = "b d f g k l m n p r s t v z br dr gl kr st tr".split()
    vowels = "a e i o u ai ou".split()
    out: dict[str, None] = {}
    while len(out) < n:
        syllables = (rng.choice(consonants) + rng.choice(vowels) for _ in range(2))
        out["".join(syllables).capitalize() + ending] = None
    return list(out)


NAMES = {  # kind: (first words, last words); a name is one of each
    "film": (words(60, 1, "x"), words(60, 2, "th")),
    "person": (words(80, 3, "n"), words(80, 4, "s")),
    "city": (words(60, 5, "l"), words(40, 6, "ford")),
    "nation": (words(30, 7, "r"), words(20, 8, "ia")),
    "company": (words(50, 9, "k"), words(30, 10, "corp")),
}


@dataclass(frozen=True)
class Asked:
    """A question with its path: path[0] is the entity asked about, path[-1] the answer."""

    text: str
    chain: tuple[str, ...]
    path: tuple[str, ...]


class World:
    """Entities, `size` of each kind, with facts and passages, all drawn from `rng`; no name is in
    `avoid`.

    `names`: kind -> names; `facts`: (name, relation) -> name.
    """

    def __init__(
        self, rng: random.Random, size: dict[str, int], avoid: frozenset[str] = frozenset()
    ):
        self.names: dict[str, list[str]] = {}
        for kind, n in size.items():
            first, last = NAMES[kind]
            chosen: dict[str, None] = {}
            while len(chosen) < n:
                name = f"{rng.choice(first)} {rng.choice(last)}"
                if name not in avoid:
                    chosen[name] = None
            self.names[kind] = list(chosen)
        of = [
            (name, relation, kind)
            for relation, (k, kind) in RELATIONS.items()
            for name in self.names[k]
        ]
        self.facts = {(name, relation): rng.choice(self.names[kind]) for name, relation, kind in of}
        self.passages = [
            self.passage(kind, name) for kind in self.names for name in self.names[kind]
        ]
        self.index = BM25.build(self.passages)

    def passage(self, kind: str, name: str) -> str:
        """Writes `"Title"` and one sentence with the entity's facts, in the format of Search-R1's
        corpus."""
        facts = [f"{r} {self.facts[name, r]}" for r, (of, _) in RELATIONS.items() if of == kind]
        return f'"{name}"\nA {kind} with {" and ".join(facts)}.'

    def search(self, query: str, k: int = 3) -> list[str]:
        """Returns the `k` best passages, as the retrieval server over this corpus does."""
        return [self.passages[row] for row, _ in self.index.search([query], k)[0]]

    def ask(self, rng: random.Random, chain: tuple[str, ...], name: str) -> Asked:
        """Asks the question that follows `chain` from `name`, with one of the three openings."""
        path = [name]
        for relation in chain:
            path.append(self.facts[path[-1], relation])
        of = "".join(f" the {relation} of" for relation in reversed(chain))
        kind = RELATIONS[chain[0]][0]
        return Asked(f"{rng.choice(OPENINGS)}{of} the {kind} {name}?", chain, tuple(path))

    def random_question(self, rng: random.Random, hops: int) -> Asked:
        chain = rng.choice(CHAINS[hops])
        return self.ask(rng, chain, rng.choice(self.names[RELATIONS[chain[0]][0]]))


def the_world() -> World:
    """Makes the world of `world/files/`, always the same one."""
    return World(random.Random(12345), FULL)


def questions(
    world: World, split: str, per_hops: dict[int, int], without: Iterable[dict] = ()
) -> list[dict]:
    """Draws distinct questions as data rows, none of them asked in `without` in other words.

    "test" asks about other entities than "train" and "valid" do.
    """
    rng = random.Random(f"questions {split}")
    heads = {}
    for kind, names in world.names.items():
        half = len(names) // 2
        heads[kind] = names[half:] if split == "test" else names[:half]
    matter = lambda text: text.partition(" the ")[2]  # noqa: E731  # without its opening
    used = {matter(row["question"]) for row in without}
    rows = []
    for hops, n in per_hops.items():
        asked = [
            world.ask(rng, chain, name)
            for chain in CHAINS[hops]
            for name in heads[RELATIONS[chain[0]][0]]
        ]
        for q in rng.sample([q for q in asked if matter(q.text) not in used], n):
            rows.append(
                {
                    "question": q.text,
                    "golden_answers": [q.path[-1]],
                    "data_source": f"world-{hops}hop",
                }
            )
    rng.shuffle(rows)
    return [{"id": f"{split}-{i}", **row} for i, row in enumerate(rows)]
