"""Does the value of an instruction depend on the policy? (`make bench-instructions`); JSON last.

Plays every combination of clauses under the first policy and under a trained one, greedy, on held-out questions. Prints
the best combinations of each and how far the two rankings agree (Spearman's rho, 95 % interval by bootstrap over the
combinations), and draws assets/instructions.png.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

import numpy as np

from config import HERE, PRESETS
from plumbing.faults import one_line
from tasks.questions import load_questions
from world.clauses import CLAUSES, write

SEARCHING = {"entity": "one entity per query", "whole": "the whole question", "memory": "no search", "": "unsaid"}


def combinations() -> list[tuple[str, ...]]:
    """Returns every set of clauses that does not contradict itself."""
    slots: dict[str, list[str]] = {}
    for name, clause in CLAUSES.items():
        slots.setdefault(clause.slot, [""]).append(name)
    return [tuple(filter(None, chosen)) for chosen in itertools.product(*slots.values())]


def values(policy: str, family: list[tuple[str, ...]], n: int) -> tuple[np.ndarray, dict[tuple[str, ...], float]]:
    """Returns the exact match of each combination on `n` questions, and of the five best ones on all of them."""
    from extras.campaigns.player import player

    test = load_questions(PRESETS["world"]["test"])
    with player(policy) as play:

        def value(clauses: tuple[str, ...], questions: list) -> float:
            rng = random.Random(0)
            return float(play([write(rng, clauses) for _ in questions], questions, 0.0).mean())

        em = np.array([value(clauses, test[:n]) for clauses in family])
        return em, {family[k]: value(family[k], test) for k in np.argsort(-em, kind="stable")[:5]}


def rho(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Returns Spearman's rho and its 95 % interval by bootstrap."""
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    draws = [rng.integers(len(x), size=len(x)) for _ in range(2000)]
    low, high = np.percentile([spearmanr(x[k], y[k]).statistic for k in draws], [2.5, 97.5])
    return float(spearmanr(x, y).statistic), float(low), float(high)


def draw(family: list[tuple[str, ...]], first: np.ndarray, trained: np.ndarray, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(5, 4.2))
    rng = np.random.default_rng(0)
    for said, label in SEARCHING.items():
        mine = [k for k, clauses in enumerate(family) if (set(clauses) & set(SEARCHING) or {""}) == {said}]
        x = first[mine] + rng.uniform(-0.004, 0.004, len(mine))  # equal values would hide each other
        ax.scatter(x, trained[mine], s=14, alpha=0.8, label=label, linewidths=0)
    ax.set(xlabel="exact match under the first policy", ylabel="under the trained policy", ylim=(-0.02, 1.02))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(title="what the instruction says of searching", frameon=False, fontsize=8, title_fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="directory of a trained policy: runs/<name>/policy")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--picture", type=Path, default=HERE / "assets" / "instructions.png")
    args = parser.parse_args()
    family = combinations()
    found: dict = {"combinations": len(family)}
    em = {}
    for name, policy in (("first", ""), ("trained", args.policy)):
        em[name], best = values(policy, family, args.questions)
        print(f"\n{name} policy, the best of {len(family)} combinations, all held-out questions:")
        for clauses, value in sorted(best.items(), key=lambda pair: -pair[1]):
            print(f"  {value:.3f}  {', '.join(clauses) or 'none'}")
        found[f"best_{name}"] = round(max(best.values()), 3)
    found["rho"] = [round(x, 3) for x in rho(em["first"], em["trained"])]
    print("\nSpearman's rho of the two rankings: {:.2f}, 95 % interval {:.2f} to {:.2f}".format(*found["rho"]))
    args.picture.parent.mkdir(exist_ok=True)
    draw(family, em["first"], em["trained"], args.picture)
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line():
        main()
