"""Demonstrations for a cold start: an agent that follows its instruction on the real facts, as
conversations.

    python -m extras.real.demos --n 960 --out demos.jsonl

Instructions are made of the world's clauses (world/clauses.py), here three kinds of them: what to
search for, when to stop, how to answer. Where an instruction is silent the agent has the habit of
the paper's static baseline, one search with the whole question, and often a sentence as its answer.
No instruction has all three clauses that solve a question.
"""

import json
import random
from pathlib import Path
from typing import Any

from config import FACTS, PRESETS, Config
from extras.bench.harness import parser_of
from extras.world.demos import choose_clauses, choose_habits
from plumbing.faults import one_line
from plumbing.files import read_jsonl, write_file
from retrieval_server import BM25
from tasks import Question
from tasks.search_qa import SearchQA
from world import clauses as world

Row = dict[str, Any]
# formats prompts and results; nobody starts its server
TASK = SearchQA(Config(**PRESETS["smollm2-135m"]))

BEST = {"entity", "cont", "exact"}
# Probability of the right behaviour under the clause, under one that contradicts it, and under
# neither (None).
OBEY = {
    "entity": {"entity": 0.97, None: 0.0},
    "full": {"cont": 0.70, "early": 0.0, None: 0.10},
    "exact": {"exact": 0.98, "verbose": 0.02, None: 0.45},
}


CHOICES = (  # of each slot: clauses, or none, with their shares
    (("entity", "whole", None), (0.65, 0.20, 0.15)),
    (("cont", "early", None), (0.65, 0.15, 0.20)),
    (("exact", "verbose", None), (0.35, 0.30, 0.35)),
)


class Facts:
    """The questions that may be shown, and the search that answers the agent."""

    def __init__(self) -> None:
        self.questions = read_jsonl(FACTS / "train.jsonl")
        self.passages = [row["contents"] for row in read_jsonl(FACTS / "corpus.jsonl")]
        self.index = BM25.build(self.passages)

    def search(self, query: str) -> str:
        """The passage that a run's server finds first."""
        [[(row, _)]] = self.index.search([query], 1)
        return self.passages[row]


def demonstrate(
    rng: random.Random, facts: Facts, q: Row, clauses: list[str]
) -> list[tuple[str, str]]:
    """Plays turns (role, text) that follow the clauses; the role "tool" has what a search
    returned."""
    by_entity, full, bare = choose_habits(rng, OBEY, clauses)
    path = [*q["chain"], q["golden_answers"][0]]
    turns, answer = [], path[-1]
    for k in range(len(q["chain"]) if by_entity and full else 1):
        query = path[k] if by_entity else q["question"]
        passage = facts.search(query)
        title = passage.split('"')[1]
        turns += [
            ("assistant", f"<search> {query} </search>"),
            ("tool", TASK.search.show([passage])),
        ]
        # who stops early has only the next entity
        answer = path[k + 1] if title == path[k] else title
    return [*turns, ("assistant", f"<answer> {answer if bare else f'It is {answer}.'} </answer>")]


def demo(rng: random.Random, facts: Facts) -> Row:
    """Makes a row: the messages of a conversation."""
    q, clauses = rng.choice(facts.questions), choose_clauses(rng, CHOICES, BEST)
    instruction = world.write_instruction(rng, clauses, rng.randint(0, 1))
    return row_of(q, instruction, demonstrate(rng, facts, q, clauses))


def row_of(q: Row, instruction: str, turns: list[tuple[str, str]]) -> Row:
    prompt = TASK.prompt(instruction, Question(q["id"], q["question"]))
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"id": q["id"], "instruction": instruction, "messages": [*prompt, *messages]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--n", type=int, default=960, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demos.jsonl"))
    args = parser.parse_args()
    with one_line("extras.real.demos"):
        rng, facts = random.Random(args.seed), Facts()
        rows = [demo(rng, facts) for _ in range(args.n)]
        # Atomically: `make real` skips what is there.
        write_file(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"{args.out}: {args.n:,} demonstrations")


if __name__ == "__main__":
    main()
