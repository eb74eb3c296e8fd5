"""How often the paper's rule of selection errs (`make bench-selection`); JSON last.

Selection sees few, noisy rewards: an instruction's weight is a moving average over the batches of some steps, and a
candidate joins by its mean on D_B, one rollout a question. Here a population's true rewards are known from a large
fixed set: every instruction is played `--repeat` times on each of `--questions` training questions at temperature 1.
From these rewards the rule is played again and again:

- pruning: Alg.1 lines 5 to 12 for K_p steps (softmax over weights, G rollouts a question, moving average), then the
  bottom half leaves. A pair of a pruned and a kept instruction is an error if the pruned one is truly better. The best
  is lost if it is among the pruned.
- joining: parents and their revisions on the same |D_B| questions, one rollout each, parent <= revision joins.

Populations are those that the world's optimizer builds, under the world's first policy, or under --policy. Differences
below --margin count as ties, which can be no errors.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402

from config import PRESETS, Config  # noqa: E402
from data import Question, load_questions  # noqa: E402
from faults import one_line  # noqa: E402
from population import Population  # noqa: E402
from rollout import Trajectory  # noqa: E402

NOBODY = Question("", "", (), "")
PARENTS = (["whole"], ["whole", "exact"], ["entity", "exact"], ["entity", "exact", "state"])
BATCHES, SIZES = (6, 12, 24, 48, 96, 512), (12, 24, 48, 96, 200)


def pruning_errors(
    R: np.ndarray, batch: int, cfg: Config, dice: np.random.Generator, trials: int, margin: float
) -> tuple[float, float]:
    """Returns (share of pruned-kept pairs in which the pruned one is truly better, share of trials that lose the best).

    R (instructions, questions, rollouts): rewards to draw from. Plays population.py's own rule.
    """
    true, (n, questions, rollouts) = R.mean((1, 2)), R.shape
    wrong, pairs, lost = 0, 0, 0
    for _ in range(trials):
        P = Population(cfg.tau_s, cfg.window)
        for k in range(n):
            P.join(str(k), None, 0)
        for _ in range(cfg.K_p):
            ids = np.array([I.id for I in P.sample(dice, batch)])
            asked = dice.integers(questions, size=(batch, 1))
            r = R[ids[:, None], asked, dice.integers(rollouts, size=(batch, cfg.G))].mean(1)
            # One trajectory with the mean reward stands for all of an instruction's: the rule sees their mean alone.
            means = {int(j): float(r[ids == j].mean()) for j in np.unique(ids)}
            P.attribute(Trajectory(j, NOBODY, 0, [], 0, reward=mean) for j, mean in means.items())
        pruned = P.prune(P.ranked(), cfg.N_parent, cfg.K_p)
        for a in pruned:
            gains = true[a.id] - true[P.ids]
            wrong += int((gains > margin).sum())
            pairs += int((np.abs(gains) > margin).sum())
        best = int(true.argmax())
        clear = true[best] - np.delete(true, best).max() > margin
        lost += int(clear and best not in P.ids)
    return wrong / max(1, pairs), lost / trials


def joining_errors(parent: np.ndarray, child: np.ndarray, n: int, dice: np.random.Generator, trials: int) -> float:
    """Returns how often a revision joins, or is turned away if it is truly better: the wrong decision.

    parent, child (questions, rollouts): rewards to draw one rollout a question from, on `n` of the questions.
    """
    better, rows = child.mean() > parent.mean(), np.arange(n)
    wrong = 0
    for _ in range(trials):
        q = dice.choice(len(parent), n, replace=False)
        k = dice.integers(parent.shape[1], size=(2, n))
        joins = child[q][rows, k[0]].mean() >= parent[q][rows, k[1]].mean()
        wrong += int(joins != better)
    return wrong / trials


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="", help="directory of a policy; default: the world's first one")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3, help="rollouts a question and instruction")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--margin", type=float, default=0.02, help="true differences below it are ties")
    args = parser.parse_args(argv)

    from bench.player import player
    from world.clauses import CLAUSES, write
    from world.optimizer import revise

    cfg, dice, texts = Config(**PRESETS["world"]), np.random.default_rng(0), random.Random(0)
    questions = load_questions(PRESETS["world"]["train"])[: args.questions]
    found: dict[str, Any] = {"questions": len(questions), "repeat": args.repeat, "pruning": {}, "joining": {}}
    with player(args.policy) as play:

        def rewards(text: str) -> np.ndarray:
            asked = [q for q in questions for _ in range(args.repeat)]
            return play([text] * len(asked), asked, 1.0).reshape(len(questions), args.repeat)

        families = []  # (parent, its revisions): rewards (questions, repeat) each
        for clauses in PARENTS:
            others = texts.sample([c for c in CLAUSES if c not in clauses], cfg.N_P - 1)
            children = [rewards(revise(texts, clauses, [add])) for add in others]
            families.append((rewards(write(texts, clauses)), children))
    print("| questions a step | pruned though better, of pairs | the best one lost |\n|---|---|---|")
    for batch in BATCHES:
        each = [
            pruning_errors(np.stack([parent, *children]), batch, cfg, dice, args.trials, args.margin)
            for parent, children in families
        ]
        wrong, lost = (float(np.mean(x)) for x in zip(*each, strict=True))
        print(f"| {batch} | {100 * wrong:.0f} % | {100 * lost:.0f} % |")
        found["pruning"][str(batch)] = [round(wrong, 3), round(lost, 3)]
    print("\n| D_B | worse revisions that join | better revisions rejected |\n|---|---|---|")
    told = [(p, c) for p, children in families for c in children if abs(c.mean() - p.mean()) > args.margin]
    for n in [n for n in SIZES if n <= len(questions)]:
        errors = [(c.mean() > p.mean(), joining_errors(p, c, n, dice, args.trials)) for p, c in told]
        rates = [
            float(np.mean([error for better, error in errors if better == kind]))
            if any(better == kind for better, _ in errors)
            else 0.0
            for kind in (False, True)
        ]
        print(f"| {n} | {100 * rates[0]:.0f} % | {100 * rates[1]:.0f} % |")
        found["joining"][str(n)] = [round(rate, 3) for rate in rates]
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line("bench/selection.py"):
        main()
