"""Should the instruction evolve before the policy trains, after, or along with it? A simulation
without a model.

    python extras/drift.py                     # 40 runs an arm and drift, half a minute

The graded world (docs/results/README.md): a question is a form of 25 lines, an instruction a set of
clauses. A clause asks to fill in a line that is otherwise left empty, or to leave one empty that is
otherwise filled in, or names a unit, always a wrong one. The reward is 0.2 plus 0.05 a point, and a
line's role says what it pays (`points`). With the drift d, from 0 to 1, some of that depends on the
policy's skill s, the probability of the right unit. In expectation:

    late, filled in:  (1 - d) + d (2s - 1)        early, left empty:  1 - d        early, filled in:  d (2s - 1)

The simulated policy obeys every clause and writes the right unit with probability s: by step, the
mean of the online runs in docs/results/rows/graded.jsonl. Nothing else is fitted. Population and
gate are population.py's; the optimizer is the scripted one of those runs, which reads what lines
paid in four failures.
"""

if not __package__:
    import root  # noqa: F401
import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from config import HERE
from evaluation.statistics import estimate_over_seeds
from extras.campaign import make_panels
from plumbing.files import read_jsonl
from population import Candidate, Population

# the first 13 lines are empty unless told; clauses 25 to 27 name a wrong unit
LINES, OPTIONAL, CLAUSES = 25, 13, 28
LATE, HARMFUL, BOTH, EITHER = slice(0, 4), slice(4, 7), slice(9, 11), slice(11, 13)
EARLY, BASE = slice(13, 17), slice(17, 21)  # the other six lines pay nothing
# sizes of the runs; prunings and evolutions come every 5 steps
BATCH, G, D_B, N_P, EVERY = 24, 5, 24, 7, 5
MISHAP = 0.04  # share of the optimizer's replies that hold no candidate
DRIFTS = (0.0, 0.5, 1.0)
ROWS = read_jsonl(HERE / "docs" / "results" / "rows" / "graded.jsonl")
SKILL = np.mean([row["curves"]["skill"] for row in ROWS if row["arm"] == "online"], axis=0)  # (60,)


def points(told: set[int], right: np.ndarray, d: float) -> np.ndarray:
    """Scores each line of n forms, (n, 25). `right` (n, 25): whether its unit would be the right
    one."""
    filled = np.array([(line in told) == (line < OPTIONAL) for line in range(LINES)])
    right = right & (max(told, default=0) < LINES)
    signed = 2.0 * right - 1
    paid = np.zeros(right.shape)
    paid[:, LATE] = filled[LATE] * (1 - d + d * signed[:, LATE])
    paid[:, HARMFUL] = -1.0 * filled[HARMFUL]
    paid[:, BOTH] = (0, -0.25, 1)[filled[BOTH].sum()]
    paid[:, EITHER] = (0, 0.5, 0)[filled[EITHER].sum()]
    paid[:, EARLY] = np.where(filled[EARLY], d * signed[:, EARLY], 1 - d)
    paid[:, BASE] = filled[BASE] * right[:, BASE]
    return paid


def reward(paid: np.ndarray) -> np.ndarray:
    return 0.2 + 0.05 * paid.sum(1)


def worth(text: str, d: float) -> float:
    """The reward of a trained policy, which knows the unit, under an instruction."""
    return float(reward(points(clauses(text), np.ones((1, LINES), bool), d))[0])


def clauses(text: str) -> set[int]:
    return {int(word) for word in text.split()}


def revise(
    rng: np.random.Generator, text: str, lost: list[int], idle: list[int], edits: int
) -> str:
    """Switches some clauses of an instruction: 60 % on lines that lost points or paid nothing, if
    there are any."""
    told = clauses(text)
    for _ in range(edits):
        lines = lost if lost and (not idle or rng.random() < 0.6) else idle
        aimed = lines and rng.random() < 0.6
        told ^= {lines[rng.integers(len(lines))] if aimed else int(rng.integers(CLAUSES))}
    return " ".join(map(str, sorted(told)))


def evolve(
    seed: int,
    d: float,
    skill: Sequence[float],
    evolutions: int = 9,
    verify: int = D_B,
    blind: bool = False,
) -> tuple[float, int]:
    """Plays a run of a policy with this skill at each step; returns its final `worth`, and
    rollouts."""
    rng, P, rollouts = np.random.default_rng(seed), Population(tau_s=0.2, window=5), 0
    # by the instruction's id: what the lines paid in its latest step
    paid: dict[int, np.ndarray] = {}

    def play(text: str, n: int, s: float) -> np.ndarray:
        return points(clauses(text), rng.random((n, LINES)) < s, d)

    for text in dict.fromkeys(["", *(revise(rng, "", [], [], 1) for _ in range(N_P - 1))]):
        P.join(text, None, 0)
    for t, s in enumerate(skill, 1):
        for j, n in Counter(I.id for I in P.sample(rng, BATCH)).items():
            paid[j] = play(P.family[j].text, n * G, s)
            P.attribute(SimpleNamespace(instruction=j, reward=r) for r in reward(paid[j]).tolist())
        rollouts += BATCH * G
        if t % EVERY == 0:
            P.prune(P.ranked(), 1, t)
        parent = P.best()
        if t % EVERY or t > EVERY * evolutions or parent.id not in paid or rng.random() < MISHAP:
            continue
        failures = paid[parent.id][np.argsort(reward(paid[parent.id]))[:4]]
        lost, idle = (
            ([], []) if blind else (np.where(x)[1].tolist() for x in (failures < 0, failures == 0))
        )
        texts = {
            revise(rng, parent.text, lost, idle, int(rng.integers(1, 4))) for _ in range(N_P - 1)
        } - {parent.text}
        own = reward(play(parent.text, verify, s)).tolist()
        new = [
            Candidate(text, parent.id, reward(play(text, verify, s)).tolist(), own)
            for text in sorted(texts)
        ]
        rollouts += verify * (1 + len(new))
        P.succeed([parent], P.admit(sorted(new, key=lambda c: -c.r), N_P - 1), t)
    return worth(P.best().text, d), rollouts


ARMS: dict[str, dict[str, Any]] = {
    "online": {"skill": SKILL},
    "before": {"skill": [SKILL[0]] * 50},
    "after": {"skill": [SKILL[-1]] * 50},
    "unverified": {"skill": SKILL, "verify": 0},
    "blind": {"skill": SKILL, "blind": True},
    # 25 steps of training: online's rollouts, all in all
    "after 25": {"skill": [SKILL[24]] * 38, "evolutions": 7},
}
# steps of training before or after the evolution
TRAINING = {"before": 60, "after": 60, "after 25": 25}


def published(arm: str, d: float) -> list[float]:
    """The final held-out rewards of the real runs, by world; [] where there are none."""
    return [row["reward"] for row in ROWS if (row["arm"], row["drift"]) == (arm, d)]


def draw(runs: dict[tuple[str, float], list[tuple[float, int]]], path: Path) -> None:
    """Draws the real runs, a dot a world, and the simulated mean and its 95 % interval of 12
    runs."""
    fig, axes = make_panels(len(DRIFTS), figsize=(10, 3), sharey=True)
    for ax, d in zip(axes, DRIFTS, strict=True):
        for x, arm in enumerate(ARMS):
            rewards, real = [r for r, _ in runs[arm, d]], published(arm, d)
            ax.plot(
                [x + 0.15] * len(real),
                real,
                ".",
                color="C0",
                alpha=0.5,
                label=None if x else "12 real runs",
            )
            half = 1.96 * np.std(rewards) / 12**0.5
            ax.errorbar(
                x - 0.15,
                np.mean(rewards),
                half,
                fmt="s",
                color="C3",
                label=None if x else "simulated",
            )
        ax.set(title=f"d = {d:g}", xticks=range(len(ARMS)), ylim=(0.3, 1))
        ax.set_xticklabels(ARMS, rotation=30, fontsize=8)
    axes[0].set_ylabel("reward at the end")
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    fig.tight_layout()
    fig.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40, help="simulated runs of an arm")
    parser.add_argument("--figure", type=Path, help="file to draw")
    args = parser.parse_args(argv)
    runs = {
        (arm, d): [evolve(k, d, **kw) for k in range(args.runs)]
        for arm, kw in ARMS.items()
        for d in DRIFTS
    }
    print("reward at the end, simulated, 95 % (of 12 real runs)\n")
    print(f"{'':12}" + "".join(f"d = {d:<28g}" for d in DRIFTS) + "rollouts")
    for arm in ARMS:
        cells = []
        for d in DRIFTS:
            real = published(arm, d)
            cells.append(
                f"{estimate_over_seeds([x for x, _ in runs[arm, d]])}"
                + (f" ({np.mean(real):.3f})" if real else "")
            )
        rollouts = TRAINING.get(arm, 0) * BATCH * G + np.mean(
            [n for d in DRIFTS for _, n in runs[arm, d]]
        )
        print(f"{arm:12}" + "".join(f"{cell:32}" for cell in cells) + f"{rollouts:,.0f}")
    if args.figure:
        draw(runs, args.figure)


if __name__ == "__main__":
    main()
