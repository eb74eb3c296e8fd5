"""Instructions that share questions: which of them are asked together, and by least squares what each is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from population import Array

Ints = npt.NDArray[np.int64]


class Fit(NamedTuple):
    """Effects of n instructions, of which only differences mean anything."""

    a: Array  # (n,) in units of reward
    cov: Array  # (n, n): the variance of a_j - a_l is cov_jj + cov_ll - 2 cov_jl
    df: int  # degrees of freedom of the variance; without any, the errors are infinite
    part: Ints  # (n,): those with one number are linked by questions; others cannot be compared

    def behind(self, leader: int) -> tuple[Array, Array]:
        """Returns (a_leader - a_j, its standard error), (n,) each; infinite where no question links the two."""
        var = self.cov.diagonal() + self.cov[leader, leader] - 2 * self.cov[leader]
        return self.a[leader] - self.a, self.error(var, self.part == self.part[leader])

    def error(self, var: Array, linked: npt.NDArray[np.bool_]) -> Array:
        return np.where(linked & (self.df > 0), np.sqrt(np.maximum(0, var)), np.inf)


class Design:
    """Which instructions have shared questions, and with what rewards, as sums from which the least squares follow.

    r_qj = mu_q + a_j + noise for question q under instruction j, with mu_q free: L a = y.
    """

    def __init__(self, ids: Sequence[int]):
        n = len(ids)
        self.ids = list(ids)  # of the instructions, in the order of the rows
        self.L: Array = np.zeros((n, n))  # of the graph whose edges are shared questions: Laplacian
        self.y: Array = np.zeros(n)  # sums of r_qj - mean over q's instructions
        self.drawn: Ints = np.zeros((n, n), int)  # questions that two have shared; diagonal: that one has had
        self.total: Array = np.zeros(n)  # sums of r_qj
        self.scatter, self.df = 0.0, 0  # sum of squares within questions, and their freedom

    def add(self, members: Ints, r: Array) -> None:
        """Adds B questions under m instructions each: their rows (B, m) and mean rewards (B, m)."""
        (B, m), n = members.shape, len(self.ids)
        asked, reward, centred = np.zeros((B, n)), np.zeros((B, n)), np.zeros((B, n))
        question = np.arange(B)[:, None]
        asked[question, members], reward[question, members] = 1, r
        centred[question, members] = r - r.mean(1, keepdims=True)
        together = asked.T @ asked
        self.L += np.diag(together.diagonal()) - together / m
        self.drawn += together.astype(int)
        self.y += centred.sum(0)
        self.total += reward.sum(0)
        self.scatter += float((centred**2).sum())
        self.df += B * (m - 1)

    def fit(self) -> Fit:
        """Returns the least squares of r on question and instruction; without freedom left the errors are infinite."""
        inverse = np.linalg.pinv(self.L, hermitian=True)
        a: Array = inverse @ self.y
        n = len(a)
        linked = np.linalg.matrix_power(self.drawn > 0, n) | np.eye(n, dtype=bool)
        part: Ints = linked.argmax(1)  # the first row that each is linked to
        df = self.df - (n - len(np.unique(part)))
        residual = max(0.0, self.scatter - float(a @ self.y))
        return Fit(a, inverse * residual / max(1, df), df, part)

    def level(self, fit: Fit) -> Array:
        """Returns (n,) the mean reward under an effect of 0, of the questions of each instruction's part."""
        n = self.drawn.diagonal()
        level: Array = np.bincount(fit.part, self.total - n * fit.a) / np.maximum(1, np.bincount(fit.part, n))
        return level[fit.part]

    def blocks(self, active: Sequence[int], sizes: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
        """Returns for each size as many of the active ids, to share a question.

        First the two that have met the least, then whoever has met the chosen ones the least. Ties go to those with
        fewer questions, then to the rng. What has been drawn in this call counts as if it had been asked.
        """
        out, rows = [], np.array([self.ids.index(j) for j in active])
        met = self.drawn.copy()
        i, j = (rows[side] for side in np.triu_indices(len(rows), 1))
        for m in sizes:
            chosen: list[int] = []
            if m > 1:
                first = np.lexsort((rng.random(len(i)), met[i, i] + met[j, j], met[i, j]))[0]
                chosen = [int(i[first]), int(j[first])]
            while len(chosen) < m:
                rest = rows[~np.isin(rows, chosen)]
                first = np.lexsort((rng.random(len(rest)), met[rest, rest], met[rest][:, chosen].sum(1)))[0]
                chosen.append(int(rest[first]))
            met[np.ix_(chosen, chosen)] += 1
            out.append([self.ids[k] for k in rng.permutation(chosen)])
        return out

    def state_dict(self) -> dict[str, Any]:
        return {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in vars(self).items()}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Design:
        """Returns the design of a state_dict."""
        design = cls(state["ids"])
        for name, x in state.items():
            setattr(design, name, np.array(x) if isinstance(getattr(design, name), np.ndarray) else x)
        return design
