"""Other rules of choosing instructions: rivals share questions, a test before a pruning, a bound at the gate.

Algorithm 1 asks every question under one instruction, so an instruction that drew easier questions looks better, and
drops half of P at every pruning, however close it is. `--rank paired` is a population that asks every question under
several and compares them there; `--gate lower_bound` lets a revision join if hardly anything is lost for certain.
docs/selection.md has the formulas and what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats would take most of a second to import

from population import Array, Instruction, Population, significantly_worse

if TYPE_CHECKING:
    from config import Config
    from rollout import Trajectory

Ints = npt.NDArray[np.int64]
Q = TypeVar("Q")
ALPHA = 0.1  # how often a generation of equals loses anyone
SURE, TOLERANCE = 0.8, 0.01  # of the gate: certainty, and the loss of mean reward that does not matter


def population_of(cfg: Config) -> Population:
    """Returns an empty population that ranks and prunes as --rank says."""
    return Paired(cfg.tau_s, cfg.window, cfg.rivals) if cfg.rank == "paired" else Population(cfg.tau_s, cfg.window)


class Paired(Population):
    """A population that compares its instructions on questions which they share, since the generation began.

    Every question goes to `rivals` of them, 0: to all, so that its difficulty and the policy's progress cancel. Weights
    are mean rewards on the common questions. All are drawn alike, not by Eq. 4: whoever is behind for certain leaves.
    """

    def __init__(self, tau_s: float, window: int, rivals: int = 2):
        super().__init__(tau_s, window)
        self.rivals = rivals
        self.design: Design | None = None  # of this generation; None before its first question
        self.looks = 0  # prunings so far in it

    def blocks(self, rng: np.random.Generator, n: int) -> list[list[int]]:
        """Returns the ids that share a question, for as many questions as `n` (question, instruction) groups make."""
        self.design = self.design or Design(self.ids)
        m = min(self.rivals or len(self.ids), len(self.ids))
        return self.design.blocks(self.ids, [m] * (n // m) + [n % m] * bool(n % m), rng)

    def draw(self, rng: np.random.Generator, questions: Sequence[Q], n: int = 1) -> list[tuple[Q, Instruction]]:
        """Returns as many pairs as there are questions, of the first of them: each under its instructions in turn."""
        blocks = self.blocks(rng, n * len(questions))
        return [(q, self.family[j]) for q, block in zip(questions, blocks, strict=False) for j in block]

    def attribute(self, taus: Iterable[Trajectory]) -> None:
        """Adds a step's questions to the comparison, and sets weights and ratings by it."""
        rewards: dict[str, dict[int, list[float]]] = {}
        for tau in taus:
            rewards.setdefault(tau.question.id, {}).setdefault(tau.instruction, []).append(tau.reward)
        for by_id in rewards.values():
            self.learn([list(by_id)], [[sum(r) / len(r) for r in by_id.values()]])
        self.weigh()

    def learn(self, blocks: Sequence[Sequence[int]], r: Sequence[Sequence[float]]) -> None:
        """Adds questions that went to as many instructions each: ids and mean rewards (questions, instructions)."""
        design = self.design = self.design or Design(self.ids)
        rows = {j: k for k, j in enumerate(design.ids)}
        design.add(np.array([[rows[j] for j in block] for block in blocks]), np.array(r, float))

    def weigh(self) -> None:
        """Sets w = mean reward on the common questions + effect, and `rating`: w with its standard error.

        There is none before the rewards have left a residual to judge by.
        """
        assert self.design
        fit, rows = self.design.fit(), [self.row(j) for j in self.ids]
        weights = (self.design.level(fit) + fit.a)[rows].tolist()
        for I, k, w, se in zip(self.active, rows, weights, fit.se(rows).tolist(), strict=True):
            if self.design.drawn[k, k]:
                I.rewards, I.rating = [w], [w, se] if 0 < se < math.inf else None

    def row(self, j: int) -> int:
        """Returns an instruction's row in the design."""
        assert self.design
        return self.design.ids.index(j)

    def probabilities(self) -> Array:
        """Returns the share of the questions that each active instruction is to get: all the same."""
        return np.full(len(self.ids), 1 / len(self.ids))

    def prune(self, ranked: Sequence[Instruction], N_parent: int, t: int) -> list[Instruction]:
        """Drops those that are significantly behind the leader, the last ones first; returns the dropped ones.

        At most floor(|P|/2), and never below N_parent. `undecided`: the rivals of whom nothing can be said yet.
        """
        self.looks += 1
        behind = self.behind(ranked)
        self.undecided = [I.id for I in ranked[1:] if I not in behind]
        room = len(ranked) - max(N_parent, len(ranked) - len(ranked) // 2)
        return self._drop(behind[max(0, len(behind) - room) :], t)

    def behind(self, ranked: Sequence[Instruction]) -> list[Instruction]:
        """Returns those whose distance to the first of `ranked` is significant: one-sided t tests.

        The data choose the leader, so that any of n (n - 1) ordered pairs may come to be tested, and they do so again
        at every pruning: the k-th of a generation spends ALPHA / (k (k + 1)), which adds up to ALPHA however many.
        """
        if not self.design:
            return []
        fit, n = self.design.fit(), len(ranked)
        if fit.df < 1 or n < 2:
            return []
        distance, se = fit.behind(self.row(ranked[0].id))
        t = -float(stdtrit(fit.df, ALPHA / (self.looks * (self.looks + 1) * n * (n - 1))))
        return [I for I in ranked[1:] if distance[k := self.row(I.id)] > t * se[k] + 1e-9]

    def succeed(self, parents: Sequence[Instruction], t: int) -> list[Instruction]:
        """Leaves the parents alone in P; the comparison begins anew."""
        self.design, self.looks, self.undecided = None, 0, []
        return super().succeed(parents, t)

    def state_dict(self) -> dict[str, Any]:
        design = self.design.state_dict() if self.design else None
        return super().state_dict() | {"design": design, "looks": self.looks, "undecided": list(self.undecided)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.design = Design.of(state["design"]) if state["design"] else None
        self.looks, self.undecided = state["looks"], list(state["undecided"])


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

    def se(self, active: Sequence[int]) -> Array:
        """Returns the standard errors of the effects of `active`, each against the mean of those linked to it."""
        each = np.eye(len(self.a))[active]
        linked = self.part[active] == self.part[active][:, None]
        contrast = each - linked @ each / linked.sum(1, keepdims=True)
        var = np.einsum("ij,jk,ik->i", contrast, self.cov, contrast)
        return self.error(var, linked.sum(1) > 1)

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

    def blocks(self, active: Sequence[int], sizes: Sequence[int], dice: np.random.Generator) -> list[list[int]]:
        """Returns for each size as many of the active ids, to share a question.

        First the two that have met the least, then whoever has met the chosen ones the least. Ties go to those with
        fewer questions, then to the dice. What has been drawn in this call counts as if it had been asked.
        """
        out, rows = [], np.array([self.ids.index(j) for j in active])
        met = self.drawn.copy()
        i, j = (rows[side] for side in np.triu_indices(len(rows), 1))
        for m in sizes:
            chosen: list[int] = []
            if m > 1:
                first = np.lexsort((dice.random(len(i)), met[i, i] + met[j, j], met[i, j]))[0]
                chosen = [int(i[first]), int(j[first])]
            while len(chosen) < m:
                rest = rows[~np.isin(rows, chosen)]
                first = np.lexsort((dice.random(len(rest)), met[rest, rest], met[rest][:, chosen].sum(1)))[0]
                chosen.append(int(rest[first]))
            met[np.ix_(chosen, chosen)] += 1
            out.append([self.ids[k] for k in dice.permutation(chosen)])
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


def gate(r: Sequence[float], r_parent: Sequence[float], rule: str) -> tuple[float, bool]:
    """Returns (bound, worse) of a revision with mean rewards r (n,) beside its parent's on the same n questions.

    It joins if the bound is at least its parent's mean, and may fill a place that is left unless it is worse. `paper`:
    the bound is its own mean, and a sign test says what is worse. `lower_bound`: d - t se >= -TOLERANCE, where d is the
    mean difference, se its standard error, t the quantile SURE with n - 1 degrees of freedom; all else is worse.
    """
    n = max(1, len(r))
    if rule == "paper":
        return sum(r) / n, significantly_worse(r, r_parent)
    d = np.array(r) - np.array(r_parent)
    margin = float(stdtrit(n - 1, SURE)) * float(d.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    bound = sum(r) / n - margin + TOLERANCE
    return bound, bound < sum(r_parent) / n
