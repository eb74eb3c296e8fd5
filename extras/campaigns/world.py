"""How the shipped policy follows instructions, and how often verification errs (`make bench-world`); JSON last.

First table: held-out exact match by the clauses of an instruction, in wordings that the warm start taught and in
wordings that it held out. Second table: parents and revisions whose true rewards are known from many questions, and how
often the gate of Alg.1 L21 (a revision joins unless it falls short of its parent) errs on |D_B| questions. It is
tried on other rollouts than those that say which of the two is better; a row of each pair is in results/gate.jsonl.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np

from config import HERE, PRESETS
from extras.campaigns.arms import Row, origin
from extras.campaigns.player import Play, player
from plumbing.faults import one_line
from tasks import Question
from tasks.questions import load_questions
from world.clauses import CLAUSES, write
from world.optimizer import revise

SETS = (
    [], ["whole"], ["whole", "exact"], ["whole", "exact", "state"], ["entity"], ["entity", "exact"],
    ["entity", "exact", "state"], ["entity", "exact", "cont"], ["entity", "exact", "state", "early"],
    ["entity", "exact", "state", "cont"], ["entity", "exact", "state", "cont", "plan"], ["memory", "exact"],
)  # fmt: skip
PARENTS = (["whole"], ["whole", "exact"], ["entity", "exact"], ["entity", "exact", "state"])
SIZES = (12, 24, 48, 96)
LEAST = 0.03  # pairs whose rewards differ by less are none of the table


def pairs(play: Play, questions: list[Question]) -> list[Row]:
    """Returns a row of each parent and revision: mean rewards of both, and how often the gate lets the revision in.

    `joins`: by |D_B|, of 2,000 draws of questions. Their rollouts are others than those of the means.
    """
    rng, np_rng, rows = random.Random(0), np.random.default_rng(0), []
    for clauses in PARENTS:
        parent = write(rng, clauses)
        means, gates = both(play, parent, questions)
        for add in [c for c in CLAUSES if c not in clauses]:
            child = revise(rng, clauses, [add])
            its_means, its_gates = both(play, child, questions)
            joins = {}
            for n in [n for n in SIZES if n <= len(questions)]:
                k = np.array([np_rng.choice(len(questions), n, replace=False) for _ in range(2000)])
                joins[str(n)] = round(float((its_gates[k].mean(1) >= gates[k].mean(1)).mean()), 4)
            row = {"parent": parent, "child": child, "add": add, "questions": len(questions), "joins": joins}
            rows.append(row | {"reward": [round(float(x.mean()), 4) for x in (means, its_means)]})
    return rows


def both(play: Play, text: str, questions: list[Question]) -> tuple[np.ndarray, np.ndarray]:
    """Returns two independent rollouts of every question under an instruction, (n,) each."""
    first, second = (play([text] * len(questions), questions, 1.0, seed) for seed in (1, 2))
    return first, second


def errors(rows: list[Row], n: int) -> tuple[float | None, float | None]:
    """Returns (worse revisions that join, better ones rejected) on n questions, of pairs that differ by `LEAST`.

    None where no such pair was tried on n.
    """
    shares: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        gain = row["reward"][1] - row["reward"][0]
        if abs(gain) >= LEAST and str(n) in row["joins"]:
            shares[gain > 0].append(row["joins"][str(n)])
    worse, better = (float(np.mean(x)) if x else None for x in (shares[False], shares[True]))
    return worse, None if better is None else 1 - better


def gate_table(rows: list[Row]) -> list[str]:
    """Returns how often the gate errs, by |D_B|."""
    lines = ["| D_B | worse revisions that join | better revisions rejected |", "|---|---|---|"]
    for n in SIZES:
        cells = ["no such pair" if x is None else f"{100 * x:.0f} %" for x in errors(rows, n)]
        lines.append(f"| {n} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--rows", type=Path, default=HERE / "results" / "gate.jsonl", help="where the pairs' rows go")
    args = parser.parse_args()

    found: dict = {}
    with player() as play:
        test = load_questions(PRESETS["world"]["test"])[: args.questions]
        print("| clauses | greedy, taught wordings | greedy, held-out wordings | T = 1, taught |")
        print("|---|---|---|---|")
        for clauses in SETS:
            row = []
            for wordings, temperature in (("taught", 0.0), ("unseen", 0.0), ("taught", 1.0)):
                rng = random.Random(0)
                texts = [write(rng, clauses, 0, wordings) for _ in test]
                row.append(float(play(texts, test, temperature).mean()))
            print(f"| {', '.join(clauses) or 'none'} | " + " | ".join(f"{x:.2f}" for x in row) + " |")
            found["+".join(clauses)] = [round(x, 3) for x in row]

        train = load_questions(PRESETS["world"]["train"])[: args.questions]
        rows = pairs(play, train)
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    args.rows.write_text("".join(json.dumps(row | origin()) + "\n" for row in rows))
    print("", *gate_table(rows), sep="\n")
    for n in SIZES:
        shares = [None if x is None else round(x, 3) for x in errors(rows, n)]
        found[f"D_B {n}"] = dict(zip(("worse_join", "better_turned_away"), shares, strict=True))
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line():
        main()
