"""Other rules for choosing instructions, singly or combined; docs/selection.md has the formulas.

    python extras/selection.py --lower_bound --rounds 2         # with 80 % confidence, who joins is hardly worse
    python extras/selection.py --groups question                     # Eq. 3 compares a question's rollouts under any
    python extras/selection.py --groups question --objective gspo     # any of objectives.py, and the flags of inspo.py

A rule is a subclass of Population with the methods in which it differs from Algorithm 1;
`population_of` combines them.
"""

if not __package__:
    import root  # noqa: F401
import math
from collections.abc import Sequence
from itertools import islice
from typing import Literal

import numpy as np
from pydantic.dataclasses import dataclass

# quantiles of Student's t; scipy.stats is slow to import
from scipy.special import stdtrit

import inspo
from extras.objectives import ObjectiveConfig, ObjectiveLearner
from population import Population, RatedCandidate
from tasks import Job, Question

# of the lower bound: certainty, and the loss of mean reward that does not matter
SURE, TOLERANCE = 0.8, 0.01


@dataclass(frozen=True)
class SelectionConfig(ObjectiveConfig):
    """choosing instructions (docs/selection.md)"""

    lower_bound: bool = False
    """who joins is at most .01 below its parent, with 80 % confidence"""
    groups: Literal["pair", "question"] = "pair"
    """Eq. 3 compares trajectories of, pair: one instruction and question; question: one
    question under any"""

    def find_fault(self) -> str:
        if self.lower_bound and self.mode == "static":
            return "--lower_bound: --mode static has one instruction; leave it out"
        if self.lower_bound and self.D_B < 2:
            return f"--D_B {self.D_B}: --lower_bound needs at least 2 questions"
        return ""


class ByQuestion(Population):
    """A group of Eq. 3 is a question's rollouts, each under an instruction drawn for it."""

    def draw_jobs(
        self, rng: np.random.Generator, questions: Sequence[Question], G: int
    ) -> list[Job]:
        drawn = iter(self.sample(rng, G * len(questions)))
        return [
            Job(I.id, I.text, q, group)
            for group, q in enumerate(questions)
            for I in islice(drawn, G)
        ]


class LowerBound(Population):
    """A candidate joins if it loses at most TOLERANCE against its parent, with confidence SURE."""

    def choose_joining(self, tested: Sequence[RatedCandidate], room: int) -> list[RatedCandidate]:
        return [
            c for c in tested if lower_bound(c.rewards, c.parent_rewards) + TOLERANCE >= c.r_parent
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


def population_of(cfg: SelectionConfig) -> Population:
    """Makes an empty population that follows the rules of --lower_bound and --groups, and else
    inspo.py."""
    rules = [LowerBound] * cfg.lower_bound + [ByQuestion] * (cfg.groups == "question")
    P: Population = type("Chosen", (*rules, Population), {})(cfg)
    return P


def main(argv: list[str] | None = None) -> None:
    inspo.main(argv, SelectionConfig, ObjectiveLearner, population_of)


if __name__ == "__main__":
    main()
