"""How often rules of selection err, the paper's beside the paired one and the lower bound (`make bench-errors`).

Selection sees few, noisy rewards: an instruction's weight is a moving average over the batches of some steps, and a
candidate joins by its mean on D_B, one rollout a question. Here a population's true rewards are known from a large
fixed set: every instruction is played `--repeat` times on each of `--questions` training questions at temperature 1.
From these rewards the rules are played again and again:

- pruning: Alg.1 lines 5 to 12 for K_p steps (softmax over weights, G rollouts a question, moving average), then the
  bottom half leaves; or the same number of groups under --rank paired, then those significantly behind leave. A pair of
  a pruned and a kept instruction is an error if the pruned one is truly better. The best is lost if it is among the
  pruned.
- joining: parents and their revisions on the same |D_B| questions, by --gate, with one or two rollouts each.

Populations are those that the world's optimizer builds, under the world's first policy, or under --policy. Differences
below --margin count as ties, which can be no errors. JSON last.
"""

import argparse
import json
import random
import sys
from dataclasses import replace
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
from selection import Paired, gate, population_of  # noqa: E402

NOBODY = Question("", "", (), "")
PARENTS = (["whole"], ["whole", "exact"], ["entity", "exact"], ["entity", "exact", "state"])
BATCHES, SIZES = (6, 12, 24, 48, 96, 512), (12, 24, 48, 96, 200)


def step(P: Population, R: np.ndarray, batch: int, G: int, dice: np.random.Generator) -> None:
    """Plays a step's `batch` groups of G rollouts under a population, with rewards drawn from R, and credits them."""
    _, questions, rollouts = R.shape
    blocks = P.blocks(dice, batch) if isinstance(P, Paired) else [[I.id] for I in P.sample(dice, batch)]
    for m in {len(block) for block in blocks}:  # the last one of a step may be smaller
        ids = np.array([block for block in blocks if len(block) == m])
        asked = dice.integers(questions, size=(len(ids), 1, 1))
        r = R[ids[:, :, None], asked, dice.integers(rollouts, size=(len(ids), m, G))].mean(2)
        if isinstance(P, Paired):
            P.learn(ids.tolist(), r.tolist())
        else:
            # One trajectory with the mean reward stands for all of an instruction's: the rule sees their mean alone.
            means = {int(j): float(r[ids == j].mean()) for j in np.unique(ids)}
            P.attribute(Trajectory(j, NOBODY, 0, [], 0, reward=mean) for j, mean in means.items())
    if isinstance(P, Paired):
        P.weigh()


def pruning_errors(
    R: np.ndarray, batch: int, cfg: Config, dice: np.random.Generator, trials: int, margin: float
) -> tuple[float, float, float]:
    """Returns what the first pruning of a generation does by --rank.

    (share of pruned-kept pairs in which the pruned one is truly better, share of trials that lose the best, pruned ones
    a trial). R (instructions, questions, rollouts): rewards to draw from. Plays the populations' own rules.
    """
    true = R.mean((1, 2))
    wrong, pairs, lost, left = 0, 0, 0, 0
    for _ in range(trials):
        P = population_of(cfg)
        for k in range(len(R)):
            P.join(str(k), None, 0)
        for _ in range(cfg.K_p):
            step(P, R, batch, cfg.G, dice)
        pruned = P.prune(P.ranked(), cfg.N_parent, cfg.K_p)
        left += len(pruned)
        for a in pruned:
            gains = true[a.id] - true[P.ids]
            wrong += int((gains > margin).sum())
            pairs += int((np.abs(gains) > margin).sum())
        best = int(true.argmax())
        clear = true[best] - np.delete(true, best).max() > margin
        lost += int(clear and best not in P.ids)
    return wrong / max(1, pairs), lost / trials, left / trials


def joining_errors(
    parent: np.ndarray, child: np.ndarray, n: int, dice: np.random.Generator, trials: int, cfg: Config
) -> float:
    """Returns how often a revision joins by --gate, or is turned away if it is truly better: the wrong decision.

    parent, child (questions, rollouts): rewards to draw --gate_samples a question from, on `n` of the questions.
    """
    better, rows = child.mean() > parent.mean(), np.arange(n)[:, None]
    wrong = 0
    for _ in range(trials):
        q = dice.choice(len(parent), n, replace=False)
        k = dice.integers(parent.shape[1], size=(2, n, cfg.gate_samples))
        r, r_parent = child[q][rows, k[0]].mean(1).tolist(), parent[q][rows, k[1]].mean(1).tolist()
        joins = gate(r, r_parent, cfg.gate)[0] >= sum(r_parent) / n
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
    print("| questions a step | rank | pruned though better, of pairs | the best one lost | pruned |")
    print("|---|---|---|---|---|")
    for batch in BATCHES:
        for rank in ("paper", "paired"):
            rule = replace(cfg, rank=rank)
            each = [
                pruning_errors(np.stack([parent, *children]), batch, rule, dice, args.trials, args.margin)
                for parent, children in families
            ]
            wrong, lost, left = (float(np.mean(x)) for x in zip(*each, strict=True))
            print(f"| {batch} | {rank} | {100 * wrong:.0f} % | {100 * lost:.0f} % | {left:.1f} |", flush=True)
            found["pruning"][f"{batch} {rank}"] = [round(x, 3) for x in (wrong, lost, left)]
    print("\n| D_B | gate | rollouts | worse revisions that join | better revisions rejected |\n|---|---|---|---|---|")
    told = [(p, c) for p, children in families for c in children if abs(c.mean() - p.mean()) > args.margin]
    for n in [n for n in SIZES if n <= len(questions)]:
        for name, samples in (("paper", 1), ("paper", 2), ("lower_bound", 1), ("lower_bound", 2)):
            rule = replace(cfg, gate=name, gate_samples=samples)
            errors = [(c.mean() > p.mean(), joining_errors(p, c, n, dice, args.trials, rule)) for p, c in told]
            rates = [
                float(np.mean([error for better, error in errors if better == kind]))
                if any(better == kind for better, _ in errors)
                else 0.0
                for kind in (False, True)
            ]
            print(f"| {n} | {name} | {samples} | {100 * rates[0]:.0f} % | {100 * rates[1]:.0f} % |", flush=True)
            found["joining"][f"{n} {name} {samples}"] = [round(rate, 3) for rate in rates]
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line("bench/selection.py"):
        main()
