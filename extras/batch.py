"""The trajectories of a step, or of a mini-batch, as the columns of which variants.py is made."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo import group_advantages
from tasks import Trajectory
from tasks.search_qa import holds_gold, normalize

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
SMALL = 1e-6  # added to a standard deviation in a denominator, as in Eq. 3


class Batch:
    """n trajectories with N action tokens and at most K turns, as columns (n,), (n, K) or, one
    after another, (N,)."""

    def __init__(
        self,
        taus: Sequence[Trajectory],
        limit: int,
        memory: Any = None,
        old: Array | None = None,
        score: Any = None,
        step: Sequence[Trajectory] = (),
    ):
        """`limit`: tokens that a trajectory may sample; `memory`: what an objective remembers from
        step to step; `step`: all trajectories of the step, if these are a mini-batch of it.

        `old`: log-probs and entropies (2, N) under pi_old; None: it is the policy in training,
        under which `score` computes them, in a pass over the mini-batch. All ranks read the same
        columns, so they do it together.
        """
        self.taus, self.limit, self.remembered, self.old, self.score = (
            taus,
            limit,
            memory,
            old,
            score,
        )
        # Trajectories (n,). The reward stage shapes the first of these; Eq. 3 compares those of a
        # group; length counts action tokens.
        self.n = len(taus)
        self.step = step or taus
        self.reward: Array = np.array([tau.reward for tau in taus], float)
        self.group = numbers(tau.group for tau in taus)
        self.instruction = numbers(tau.instruction_id for tau in taus)
        self.question = numbers(tau.question.id for tau in taus)
        self.correct: Mask = np.array([not tau.failed for tau in taus], bool)
        self.length: Ints = np.array([sum(tau.mask) for tau in taus], int)

    # ---- trajectories (n,)

    @cached_property
    def answer(self) -> Ints:
        """Numbers of equal answers, normalized as for exact match; -1 without one."""
        texts = [normalize(tau.prediction or "") for tau in self.taus]
        return np.where([text != "" for text in texts], numbers(texts), -1)

    @cached_property
    def mixed(self) -> Mask:
        """Whether each one's group has both right and wrong answers, in the whole step: a mini-batch
        may cut a group."""
        right = {tau.group for tau in self.step if not tau.failed}
        wrong = {tau.group for tau in self.step if tau.failed}
        return np.array([tau.group in right & wrong for tau in self.taus], bool)

    # ---- turns (n, K)

    @cached_property
    def acted(self) -> Ints:
        """Tokens of each turn."""
        return self.turns([turn_lengths(tau) for tau in self.taus])

    @cached_property
    def called(self) -> Ints:
        """Whether a tool has answered the turn's call, 1 or 0."""
        return self.turns([[turn.result is not None for turn in tau.turns] for tau in self.taus])

    @cached_property
    def found(self) -> Ints:
        """Whether what the tool returned holds a gold answer, 1 or 0."""
        rows = [
            [holds_gold(turn.result or [], tau.question.golds) for turn in tau.turns]
            for tau in self.taus
        ]
        return self.turns(rows)

    @cached_property
    def state(self) -> Ints:
        """Numbers of equal states: the group, and what the turn is the answer to; -1 where there is
        no turn."""
        seen = [
            [(int(g), "start"), *((int(g), tuple(turn.result or ())) for turn in tau.turns)][
                : len(tau.turns)
            ]
            for g, tau in zip(self.group, self.taus, strict=True)
        ]
        flat = iter(numbers(x for row in seen for x in row).tolist())
        return self.turns([[next(flat) for _ in row] for row in seen], empty=-1)

    def turns(self, rows: Sequence[Sequence[int]], empty: int = 0) -> Ints:
        """Returns rows of numbers, one a turn, as a matrix (n, K)."""
        out = np.full((len(rows), max(map(len, rows), default=0)), empty)
        for k, row in enumerate(rows):
            out[k, : len(row)] = row
        return out

    # ---- action tokens (N,)

    @cached_property
    def tau(self) -> Ints:
        """The trajectory of each token."""
        return np.repeat(np.arange(self.n), self.length)

    @cached_property
    def pi_old(self) -> Array:
        """Log-probs and entropies (2, N) under pi_old."""
        return self.score() if self.old is None else self.old

    @cached_property
    def log_rho(self) -> Array:
        """Log-probs under the policy in training minus those under pi_old."""
        return np.zeros(len(self.tau)) if self.old is None else self.score()[0] - self.old[0]

    @cached_property
    def engine(self) -> Array:
        """Log-probs under the engine's policy."""
        return np.array(
            [lp for tau in self.taus for lp, m in zip(tau.logps, tau.mask, strict=True) if m], float
        )

    @cached_property
    def advantage(self) -> Array:
        """A-hat of each trajectory, as `set_advantages` has left it."""
        return np.array([tau.advantage for tau in self.taus], float)

    @cached_property
    def A(self) -> Array:
        """A-hat, as `set_advantages` has left it in the trajectories."""
        credit: list[Any] = [vars(tau).get("credit") for tau in self.taus]
        if not any(credit):
            return self.advantage[self.tau]
        return np.concatenate(
            [np.repeat(row, turn_lengths(tau)) for row, tau in zip(credit, self.taus, strict=True)]
        )

    @property
    def grpo(self) -> Array:
        """Eq. 3 of each trajectory (n,)."""
        return self.each(group_advantages, self.reward, self.group)

    # ---- arithmetic

    def mean(self, x: Array | Ints | Mask, of: Ints) -> Array:
        """Returns for each entry of x the mean over those with its number in `of`."""
        out: Array = (np.bincount(of, x) / np.maximum(1, np.bincount(of)))[of]
        return out

    def each(self, f: Callable[[Array], Array], x: Array, of: Ints) -> Array:
        """Returns f of every group of entries; 0 for an entry that is alone in its group."""
        out = np.zeros(len(x))
        for rows in groups(of):
            if len(rows) > 1:
                out[rows] = f(x[rows])
        return out

    def per_instruction(self, A: Array) -> Array:
        """Returns A minus its mean over the trajectories of the same instruction.

        A baseline across groups compares instructions too, and would credit tokens for their
        instruction's words. That belongs in the weights of Eq. 6.
        """
        return A - self.mean(A, self.instruction)


def turn_lengths(tau: Trajectory) -> list[int]:
    """Returns how many tokens each turn sampled."""
    return [sum(run) for sampled, run in groupby(tau.mask) if sampled]


def numbers(keys: Iterable[Hashable]) -> Ints:
    """Returns 0, 1, ... for each key, in the order of their first appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], int)


def groups(number: Ints) -> list[Ints]:
    """Returns the places of each group's members."""
    return [np.flatnonzero(number == k) for k in range(number.max(initial=-1) + 1)]
