"""How often rules of selection err, the paper's beside the paired one and the lower bound (`make bench-errors`).

Selection sees few, noisy rewards: an instruction's weight is a moving average over the batches of some steps, and a
candidate joins by its mean on D_B, one rollout a question. Here a population's true rewards are known from a large
fixed set: every instruction is played `--repeat` times on each of `--questions` training questions at temperature 1.
From these rewards the rules are played again and again:

- ranking and pruning: Alg.1 lines 5 to 12 for K_p steps (softmax over weights, G rollouts a question, moving average),
  then the bottom half leaves; or as many groups under --rank paired, then those significantly behind leave; or under
  E-SPL, whose TrueSkill ranks and which prunes nobody: its latest 5 programs play, here the first 5. A pair is ranked,
  or pruned, in the wrong order if the lower, or the pruned, one is truly better. The best is missed if it is not ranked
  first, and lost if it is pruned.
- joining: parents and their revisions on the same |D_B| questions, by --gate, with one or two rollouts each; or FST's
  round of GEPA: strictly more right than its parent on --failures questions that the parent had failed, then not
  dominated by it on D_B.

Populations are those that the world's optimizer builds, under the world's first policy, or under --policy. Differences
below --margin count as ties, which can be no errors. JSON last.
"""

import argparse
import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import inspo
from config import PRESETS, Config
from extras import espl
from extras.espl import RECENT, ESPLConfig, Pool
from extras.fst import instance_wins
from extras.selection import Paired, SelectionConfig, population_of
from plumbing.faults import one_line
from population import Candidate, Population
from tasks import Question, Trajectory
from tasks.questions import load_questions

NOBODY = Question("", "")
WORLD = PRESETS["world"]
Rule = Callable[[Any], Population]  # makes the empty population of a configuration
PARENTS = (["whole"], ["whole", "exact"], ["entity", "exact"], ["entity", "exact", "state"])
BATCHES, SIZES = (6, 12, 24, 48, 96, 512), (12, 24, 48, 96, 200)


class Errors(NamedTuple):
    """What a population does wrong until its first pruning, as shares: of pairs that differ, or of trials."""

    misranked: float  # pairs in the wrong order
    missed: float  # trials in which the best is not ranked first
    wrong: float  # pairs of a pruned and a kept one in which the pruned one is better
    lost: float  # trials in which the best is pruned
    pruned: float  # instructions a trial


def step(P: Population, R: np.ndarray, batch: int, G: int, rng: np.random.Generator) -> None:
    """Plays a step's `batch` groups of G rollouts under a population, with rewards drawn from R, and credits them."""
    _, questions, rollouts = R.shape
    if isinstance(P, Pool):  # the first question's programs play all questions
        k = min(P.rivals, len(P))
        blocks = [[job.instruction for job in P.draw(rng, [NOBODY] * k, 1)]] * (batch // k)
    else:
        blocks = P.blocks(rng, batch) if isinstance(P, Paired) else [[I.id] for I in P.sample(rng, batch)]
    for m in {len(block) for block in blocks}:  # the last one of a step may be smaller
        ids = np.array([block for block in blocks if len(block) == m])
        asked = rng.integers(questions, size=(len(ids), 1, 1))
        r = R[ids[:, :, None], asked, rng.integers(rollouts, size=(len(ids), m, G))].mean(2)
        if isinstance(P, Paired):
            P.learn(ids.tolist(), r.tolist())
        elif isinstance(P, Pool):
            P.rate(dict(zip(ids[0].tolist(), r.mean(0).tolist(), strict=True)))
        else:
            # One trajectory with the mean reward stands for all of an instruction's: the rule sees their mean alone.
            means = {int(j): float(r[ids == j].mean()) for j in np.unique(ids)}
            P.attribute(Trajectory(j, NOBODY, 0, [], 0, reward=mean) for j, mean in means.items())
    if isinstance(P, Paired):
        P.weigh()


def choosing_errors(
    rule: Rule, R: np.ndarray, batch: int, cfg: Config, rng: np.random.Generator, trials: int, margin: float
) -> Errors:
    """Returns what ranking and the first pruning of a generation do wrong, by the population's own rules.

    R (instructions, questions, rollouts): rewards to draw from.
    """
    prunes = not isinstance(rule(cfg), Pool)
    R = R if prunes else R[:RECENT]
    true = R.mean((1, 2))
    best = int(true.argmax())
    clear = true[best] - np.delete(true, best).max() > margin
    misranked, ranks, wrong, pairs, missed, lost, left = (0,) * 7
    for _ in range(trials):
        P = rule(cfg)
        for k in range(len(R)):
            P.join(str(k), None, 0)
        for _ in range(cfg.K_p):
            step(P, R, batch, cfg.G, rng)
        ranked = P.ranked()
        order = true[[I.id for I in ranked]]
        ahead = np.subtract.outer(order, order)[np.triu_indices(len(order), 1)]  # of the higher over the lower one
        misranked += int((ahead < -margin).sum())
        ranks += int((np.abs(ahead) > margin).sum())
        missed += int(clear and ranked[0].id != best)
        pruned = P.prune(ranked, cfg.N_parent, cfg.K_p) if prunes else []
        left += len(pruned)
        for a in pruned:
            gains = true[a.id] - true[P.ids]
            wrong += int((gains > margin).sum())
            pairs += int((np.abs(gains) > margin).sum())
        lost += int(clear and best not in P.ids)
    return Errors(misranked / max(1, ranks), missed / trials, wrong / max(1, pairs), lost / trials, left / trials)


def joining_errors(
    rule: Rule, parent: np.ndarray, child: np.ndarray, n: int, rng: np.random.Generator, trials: int, cfg: Config
) -> float:
    """Returns how often a revision joins, or is turned away if it is truly better: the wrong decision.

    parent, child (questions, rollouts): rewards to draw --gate_samples a question from, on `n` of the questions.
    """
    P, better, rows = rule(cfg), child.mean() > parent.mean(), np.arange(n)[:, None]
    wrong = 0
    for _ in range(trials):
        q = rng.choice(len(parent), n, replace=False)
        k = rng.integers(parent.shape[1], size=(2, n, cfg.gate_samples))
        r, r_parent = child[q][rows, k[0]].mean(1).tolist(), parent[q][rows, k[1]].mean(1).tolist()
        joins = bool(P.admit([Candidate("", 0, r, r_parent)], 1))
        wrong += int(joins != better)
    return wrong / trials


def front_errors(
    parent: np.ndarray, child: np.ndarray, n: int, rng: np.random.Generator, trials: int, cfg: Config
) -> float:
    """Returns the same of a round of GEPA with one revision; D_B has none of the questions that were shown."""
    better, wrong = child.mean() > parent.mean(), 0

    def play(rewards: np.ndarray, asked: np.ndarray) -> np.ndarray:
        return rewards[asked, rng.integers(rewards.shape[1], size=len(asked))]

    for _ in range(trials):
        asked = rng.permutation(len(parent))
        shown = asked[play(parent, asked) < 1][: cfg.failures]
        D_B = asked[~np.isin(asked, shown)][:n]
        passes = len(shown) and play(child, shown).mean() > play(parent, shown).mean()
        joins = passes and instance_wins(np.stack([play(parent, D_B), play(child, D_B)]))[1] > 0
        wrong += int(bool(joins) != better)
    return wrong / trials


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="", help="directory of a policy; default: the world's first one")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3, help="rollouts a question and instruction")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--margin", type=float, default=0.02, help="true differences below it are ties")
    args = parser.parse_args(argv)

    from extras.campaigns.player import player
    from world.clauses import CLAUSES, write
    from world.optimizer import revise

    cfg, rng, texts = Config(**WORLD), np.random.default_rng(0), random.Random(0)
    questions = load_questions(WORLD["train"])[: args.questions]
    found: dict[str, Any] = {"questions": len(questions), "repeat": args.repeat, "choosing": {}, "joining": {}}
    with player(args.policy) as play:

        def rewards(text: str) -> np.ndarray:
            asked = [q for q in questions for _ in range(args.repeat)]
            return play([text] * len(asked), asked, 1.0).reshape(len(questions), args.repeat)

        families = []  # (parent, its revisions): rewards (questions, repeat) each
        for clauses in PARENTS:
            others = texts.sample([c for c in CLAUSES if c not in clauses], cfg.N_P - 1)
            children = [rewards(revise(texts, clauses, [add])) for add in others]
            families.append((rewards(write(texts, clauses)), children))
    rules: dict[str, tuple[Rule, Config]] = {
        "paper": (inspo.population_of, cfg),
        "paired": (population_of, SelectionConfig(**WORLD, rank="paired")),
        "espl": (espl.population_of, ESPLConfig(**WORLD)),
    }
    print(
        "| groups a step | | pairs ranked in the wrong order | the best one missed | pairs pruned in the wrong order |"
        " the best one lost | pruned |\n|---|---|---|---|---|---|---|"
    )
    for batch in BATCHES:
        for name, (rule, knobs) in rules.items():
            each = [
                choosing_errors(rule, np.stack([parent, *children]), batch, knobs, rng, args.trials, args.margin)
                for parent, children in families
            ]
            mean = Errors(*(float(np.mean(x)) for x in zip(*each, strict=True)))
            shares = " | ".join(f"{100 * x:.0f} %" for x in mean[:-1])
            print(f"| {batch} | {name} | {shares} | {mean.pruned:.1f} |", flush=True)
            found["choosing"][f"{batch} {name}"] = [round(x, 3) for x in mean]
    print("\n| D_B | gate | rollouts | worse revisions that join | better revisions rejected |\n|---|---|---|---|---|")
    told = [(p, c) for p, children in families for c in children if abs(c.mean() - p.mean()) > args.margin]
    gates = [(gate, samples) for gate in ("paper", "lower_bound") for samples in (1, 2)]
    for n in [n for n in SIZES if n <= len(questions)]:
        for name, samples in [*gates, ("fst", 1)]:
            errs = front_errors
            if name != "fst":
                cfg = SelectionConfig(**WORLD, gate=name, gate_samples=samples)
                errs = partial(joining_errors, population_of)
            errors = [(c.mean() > p.mean(), errs(p, c, n, rng, args.trials, cfg)) for p, c in told]
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
    with one_line("extras.campaigns.errors"):
        main()
