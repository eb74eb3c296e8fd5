"""Instructions that share questions: which of them are asked together, and by least squares what
each is worth."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from population import Array

Ints = npt.NDArray[np.int64]


class Fit(NamedTuple):
    """Effects of n instructions, of which only differences mean anything."""

    a: Array  # (n,) in units of reward
    # (n,): the mean reward under an effect of 0, of the questions of each instruction's part
    level: Array
    cov: Array  # (n, n): the variance of a_j - a_l is cov_jj + cov_ll - 2 cov_jl
    df: int  # degrees of freedom of the variance; without any, the errors are infinite
    part: Ints  # (n,): those with one number are linked by questions; others cannot be compared

    def behind(self, leader: int) -> tuple[Array, Array]:
        """Returns (a_leader - a_j, its standard error), (n,) each; infinite where no question links
        the two."""
        var = self.cov.diagonal() + self.cov[leader, leader] - 2 * self.cov[leader]
        linked = (self.part == self.part[leader]) & (self.df > 0)
        return self.a[leader] - self.a, np.where(linked, np.sqrt(np.maximum(0, var)), np.inf)


class Design:
    """Which instructions have shared questions, and with what rewards.

    r_qj = mu_q + a_j + noise for question q under instruction j, with mu_q free.
    """

    def __init__(
        self,
        ids: Sequence[int],
        asked: Sequence[list[int]] = (),
        rewards: Sequence[list[float]] = (),
    ):
        """`asked`: the ids that each question went to; `rewards`: their mean rewards on it."""
        self.ids, self.asked, self.rewards = list(ids), list(asked), list(rewards)

    def columns(self) -> tuple[Array, Array]:
        """Returns (questions, n) each: whether a question went to an instruction, and the reward or
        0."""
        row = {j: k for k, j in enumerate(self.ids)}
        went, reward = np.zeros((2, len(self.asked), len(self.ids)))
        for q, (block, r) in enumerate(zip(self.asked, self.rewards, strict=True)):
            places = [row[j] for j in block]
            went[q, places], reward[q, places] = 1, r
        return went, reward

    def drawn(self) -> Ints:
        """Returns (n, n) how many questions two have shared; diagonal: that one has had."""
        went, _ = self.columns()
        shared: Ints = (went.T @ went).astype(int)
        return shared

    def fit(self) -> Fit:
        """Returns the least squares of r on question and instruction; without freedom left the
        errors are infinite."""
        went, reward = self.columns()
        n, size = len(self.ids), went.sum(1, keepdims=True)
        centred = went * (reward - reward.sum(1, keepdims=True) / size)
        times = went.sum(0)
        laplacian = np.diag(times) - (went / size).T @ went
        inverse = np.linalg.pinv(laplacian, hermitian=True)
        y = centred.sum(0)
        a: Array = inverse @ y
        linked = np.linalg.matrix_power(went.T @ went > 0, n) | np.eye(n, dtype=bool)
        part: Ints = linked.argmax(1)  # the first row that each is linked to
        df = int((size - 1).sum()) - (n - len(np.unique(part)))
        residual = max(0.0, float((centred**2).sum() - a @ y))
        total = np.bincount(part, reward.sum(0) - times * a)
        level: Array = (total / np.maximum(1, np.bincount(part, times)))[part]
        return Fit(a, level, inverse * residual / max(1, df), df, part)

    def blocks(
        self, active: Sequence[int], sizes: Sequence[int], rng: np.random.Generator
    ) -> list[list[int]]:
        """Returns for each size, 1 or 2, as many of the active ids, to share a question.

        The two that have met the least; ties, and who is alone, go by the fewest questions, then by
        the rng. What has been drawn in this call counts as if it had been asked.
        """
        out, rows = [], np.array([self.ids.index(j) for j in active])
        met = self.drawn()
        i, j = (rows[side] for side in np.triu_indices(len(rows), 1))
        for m in sizes:
            if m == 1:
                chosen = rows[np.lexsort((rng.random(len(rows)), met[rows, rows]))[:1]]
            else:
                first = np.lexsort((rng.random(len(i)), met[i, i] + met[j, j], met[i, j]))[0]
                chosen = np.array([i[first], j[first]])
            met[np.ix_(chosen, chosen)] += 1
            out.append([self.ids[k] for k in rng.permutation(chosen)])
        return out
