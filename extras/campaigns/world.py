"""How the shipped policy follows instructions, and how often verification errs (`make bench-world`); JSON last.

First table: held-out exact match by the clauses of an instruction, in wordings that the warm start taught and in
wordings that it held out. Second table: parents and revisions whose true rewards are known from many questions, and how
often the gate of Alg.1 L21 (a revision joins unless it falls short of its parent) errs on |D_B| questions.
"""

import argparse
import json
import random

from plumbing.faults import one_line

SETS = (
    [], ["whole"], ["whole", "exact"], ["whole", "exact", "state"], ["entity"], ["entity", "exact"],
    ["entity", "exact", "state"], ["entity", "exact", "cont"], ["entity", "exact", "state", "early"],
    ["entity", "exact", "state", "cont"], ["entity", "exact", "state", "cont", "plan"], ["memory", "exact"],
)  # fmt: skip
PARENTS = (["whole"], ["whole", "exact"], ["entity", "exact"], ["entity", "exact", "state"])
SIZES = (12, 24, 48, 96)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=300)
    args = parser.parse_args()

    import numpy as np

    from config import PRESETS
    from extras.campaigns.player import player
    from tasks.questions import load_questions
    from world.clauses import CLAUSES, write
    from world.optimizer import revise

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
        rng, np_rng = random.Random(0), np.random.default_rng(0)
        sizes = [n for n in SIZES if n <= len(train)]
        joined = {kind: {n: [] for n in sizes} for kind in ("worse", "better")}
        for clauses in PARENTS:
            parent = play([write(rng, clauses)] * len(train), train, 1.0)
            for add in [c for c in CLAUSES if c not in clauses]:
                child = play([revise(rng, clauses, [add])] * len(train), train, 1.0)
                if abs(gain := child.mean() - parent.mean()) < 0.03:
                    continue
                for n in sizes:
                    k = np.array([np_rng.choice(len(train), n, replace=False) for _ in range(2000)])
                    passed = float((child[k].mean(1) >= parent[k].mean(1)).mean())
                    joined["better" if gain > 0 else "worse"][n].append(passed)
    print("\n| D_B | worse revisions that join | better revisions rejected |\n|---|---|---|")
    for n in sizes:
        wrong, lost = float(np.mean(joined["worse"][n])), 1 - float(np.mean(joined["better"][n]))
        print(f"| {n} | {100 * wrong:.0f} % | {100 * lost:.0f} % |")
        found[f"D_B {n}"] = {"worse_join": round(wrong, 3), "better_turned_away": round(lost, 3)}
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line():
        main()
