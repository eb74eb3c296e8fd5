"""Other rules for choosing instructions, singly or combined; docs/selection.md has the formulas and
what they cost.

    python extras/selection.py --rank paired                         # two share a question, a test prunes
    python extras/selection.py --gate lower_bound --rounds 2         # a revision must almost surely be hardly worse
    python extras/selection.py --gate fill                           # places left go to revisions not shown to be worse
    python extras/selection.py --rank paired --objective consistent  # any of objectives.py, and the flags of inspo.py

A rule is a subclass of Population with the methods in which it differs from Algorithm 1;
`population_of` combines them.
"""

if not __package__:
    import root  # noqa: F401
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# P(X <= k), quantiles of Student's t; scipy.stats is slow to import
from scipy.special import bdtr, stdtrit

import inspo
from config import knob
from extras.design import Design
from extras.objectives import ObjectiveConfig, ObjectiveLearner
from population import Array, Candidate, Instruction, Population
from tasks import Job, Question, Trajectory

ALPHA = 0.1  # how often a generation of equals loses anyone
# of the lower bound: certainty, and the loss of mean reward that does not matter
SURE, TOLERANCE = 0.8, 0.01


@dataclass(frozen=True)
class SelectionConfig(ObjectiveConfig):
    """choosing instructions (docs/selection.md)"""

    rank: str = knob(
        "paper",
        "paper; paired: two share a question, and a test prunes those significantly behind",
        of=("paper", "paired"),
    )
    gate: str = knob(
        "paper",
        "who joins: paper; lower_bound: at most .01 below its parent, with 80 % confidence; fill: where places"
        " are left, also those not significantly below",
        of=("paper", "lower_bound", "fill"),
    )

    def find_fault(self) -> str:
        for name in ("rank", "gate"):
            if self.mode == "static" and getattr(self, name) != "paper":
                return f"--{name} {getattr(self, name)}: --mode static has one instruction; leave it out"
        if self.gate == "lower_bound" and self.D_B < 2:
            return f"--D_B {self.D_B}: --gate lower_bound needs at least 2 questions"
        return ""


class Fill(Population):
    """Places that are left after the rounds go to candidates that a sign test does not find worse
    than their parent.

    Those with the smallest loss against their own parent come first, since raw rewards of different
    rounds do not compare.
    """

    def __init__(self, cfg: SelectionConfig):
        super().__init__(cfg)
        self.spare: list[Candidate] = []  # of the evolution under way

    def select_top(self, verified: Sequence[Candidate], room: int) -> list[Candidate]:
        joining = super().select_top(verified, room)
        others = (c for c in verified if c not in joining)
        self.spare += [c for c in others if not significantly_worse(c.rewards, c.parent_rewards)]
        return joining

    def replace_by(
        self, parents: Sequence[Instruction], new: Sequence[Candidate], t: int
    ) -> list[Instruction]:
        spare, self.spare = sorted(self.spare, key=lambda c: c.r_parent - c.r), []
        return super().replace_by(
            parents, [*new, *spare[: self.cfg.N_P - len(parents) - len(new)]], t
        )


def significantly_worse(r: Sequence[float], r_parent: Sequence[float]) -> bool:
    """Tests whether r (n,) is below r_parent (n,) on the same n questions: exact sign test,
    one-sided, 5 %."""
    wins = sum(a > b for a, b in zip(r, r_parent, strict=True))
    losses = sum(a < b for a, b in zip(r, r_parent, strict=True))
    return bool(bdtr(wins, wins + losses, 0.5) < 0.05)  # ties say nothing


class LowerBound(Population):
    """A candidate joins if it loses at most TOLERANCE against its parent, with confidence SURE."""

    def select_top(self, verified: Sequence[Candidate], room: int) -> list[Candidate]:
        return [
            c
            for c in verified
            if lower_bound(c.rewards, c.parent_rewards) + TOLERANCE >= c.r_parent
        ][:room]


def lower_bound(r: Sequence[float], r_parent: Sequence[float]) -> float:
    """Returns mean(r) - t se of a revision with mean rewards r (n,), and its parent's on the same n
    questions.

    se: standard error of the mean difference; t: the quantile SURE with n - 1 degrees of freedom.
    """
    n = len(r)
    if n < 2:
        return -math.inf
    difference = np.array(r) - np.array(r_parent)
    return sum(r) / n - float(stdtrit(n - 1, SURE)) * float(difference.std(ddof=1)) / math.sqrt(n)


class Paired(Population):
    """A population that compares its instructions on questions which they share, since the
    generation began.

    Every question goes to two of them, so that its difficulty and the policy's progress cancel.
    Weights are mean rewards on the common questions. All are drawn equally often, not by Eq. 4:
    those significantly behind are dropped.
    """

    def __init__(self, cfg: SelectionConfig):
        super().__init__(cfg)
        self.design: Design | None = None  # of this generation; None before its first question
        self.looks = 0  # prunings so far in it

    def draw_jobs(
        self, rng: np.random.Generator, questions: Sequence[Question], G: int
    ) -> list[Job]:
        """Makes as many groups as there are questions, of the first of them: each under its
        instructions in turn."""
        blocks = zip(questions, self.blocks(rng, len(questions)), strict=False)
        drawn = [(q, self.family[j]) for q, block in blocks for j in block]
        return [Job(I.id, I.text, q, group) for group, (q, I) in enumerate(drawn) for _ in range(G)]

    def blocks(self, rng: np.random.Generator, n: int) -> list[list[int]]:
        """Chooses the ids that share a question, for as many questions as `n` (question,
        instruction) groups make."""
        self.design = self.design or Design(self.ids)
        m = min(2, len(self.ids))
        return self.design.blocks(self.ids, [m] * (n // m) + [n % m] * bool(n % m), rng)

    def probabilities(self) -> Array:
        """Returns the share of the questions that each active instruction is to get: all the
        same."""
        return np.full(len(self.ids), 1 / len(self.ids))

    def update_weights(self, taus: Iterable[Trajectory]) -> None:
        """Adds a step's questions to the comparison, and sets weights by it."""
        rewards: dict[str, dict[int, list[float]]] = {}
        for tau in taus:
            assert tau.instruction is not None
            rewards.setdefault(tau.question.id, {}).setdefault(tau.instruction, []).append(
                tau.reward
            )
        for by_id in rewards.values():
            self.learn([list(by_id)], [[sum(r) / len(r) for r in by_id.values()]])
        self.weigh()

    def learn(self, blocks: Sequence[list[int]], r: Sequence[list[float]]) -> None:
        """Adds questions: the ids of the instructions that each went to, and their mean rewards."""
        design = self.design = self.design or Design(self.ids)
        design.asked += blocks
        design.rewards += r

    def weigh(self) -> None:
        """Sets w = mean reward on the common questions + effect."""
        assert self.design
        fit, times = self.design.fit(), self.design.drawn().diagonal()
        for k, j in enumerate(self.design.ids):
            if times[k] and j in self.ids:
                self.family[j].rewards = [float(fit.level[k] + fit.a[k])]

    def prune(self, ranked: Sequence[Instruction], N_parent: int, t: int) -> list[Instruction]:
        """Drops those that are significantly behind the leader, the last ones first; returns the
        dropped ones.

        At most floor(|P|/2), and never below N_parent.
        """
        self.looks += 1
        behind = self.behind(ranked)
        room = len(ranked) - max(N_parent, len(ranked) - len(ranked) // 2)
        return self._drop(behind[max(0, len(behind) - room) :], t)

    def behind(self, ranked: Sequence[Instruction]) -> list[Instruction]:
        """Finds those whose distance to the first of `ranked` is significant: one-sided t tests.

        The data choose the leader, so that any of n (n - 1) ordered pairs may come to be tested,
        and they do so again at every pruning: the k-th of a generation spends ALPHA / (k (k + 1)),
        which adds up to ALPHA however many.
        """
        if not self.design or len(ranked) < 2:
            return []
        fit, n, rows = self.design.fit(), len(ranked), [self.design.ids.index(I.id) for I in ranked]
        distance, se = fit.behind(rows[0])
        t = -float(stdtrit(max(1, fit.df), ALPHA / (self.looks * (self.looks + 1) * n * (n - 1))))
        return [I for I, k in zip(ranked, rows, strict=True) if distance[k] > t * se[k] + 1e-9]

    def replace_by(
        self, parents: Sequence[Instruction], new: Sequence[Candidate], t: int
    ) -> list[Instruction]:
        """Starts the comparison anew with each generation."""
        joined = super().replace_by(parents, new, t)
        if joined:
            self.design, self.looks = None, 0
        return joined

    def state_dict(self) -> dict[str, Any]:
        design = self.design and {name: [*x] for name, x in vars(self.design).items()}
        return super().state_dict() | {"design": design, "looks": self.looks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.design = state["design"] and Design(**state["design"])
        self.looks = state["looks"]


RULES = {"paired": Paired, "lower_bound": LowerBound, "fill": Fill}


def population_of(cfg: SelectionConfig) -> Population:
    """Makes an empty population that follows the rules of --rank and --gate, and else the
    paper."""
    rules = [RULES[name] for name in (cfg.gate, cfg.rank) if name in RULES]
    P: Population = type("Chosen", (*rules, Population), {})(cfg)
    return P


def main(argv: list[str] | None = None) -> None:
    inspo.main(argv, SelectionConfig, ObjectiveLearner, population_of)


if __name__ == "__main__":
    main()
