"""What the policy is trained towards: 34 published variants of GRPO, besides Eq. 2 and 3.

    python extras/objectives.py --objective gspo      # and the flags of inspo.py; docs/objectives.md lists all

An objective is a line of `OBJECTIVES` below: it names the stages in which it differs from GRPO, functions in
variants.py. Most are functions of a `Batch`, the trajectories as columns; the surrogate is one of n tokens, in torch.

    set_advantages   a step's trajectories, on rank 0:  reward -> advantage -> credit over turns
    terms            a mini-batch's, on every rank:     selection -> weights -> clip bounds -> further columns
    surrogate        S (n,) of some tokens, in place of Eq. 2's `grpo.clipped_surrogate`
"""

if not __package__:
    import root  # noqa: F401
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import inspo
from config import Config, knob
from extras import variants as v
from grpo import Learner, Terms, clipped_surrogate, group_advantages
from tasks import Trajectory
from tasks.questions import holds_gold, normalize

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Batch:
    """n trajectories with N action tokens and at most K turns, as columns (n,), (n, K) or, one after another, (N,)."""

    def __init__(
        self, taus: Sequence[Trajectory], limit: int = 0, memory: dict[str, Any] | None = None,
        old: Array | None = None, score: Callable[[], Array] | None = None,
    ):  # fmt: skip
        """`limit`: tokens that a trajectory may sample; `memory`: what an objective remembers from step to step.

        `old`: log-probs and entropies (2, N) under pi_old; None: it is the policy in training, under which `score`
        computes them, in a pass over the mini-batch. All ranks read the same columns, so they do it together.
        """
        self.taus, self.limit, self.memory = taus, limit, {} if memory is None else memory
        self.old, self.score = old, score or (lambda: np.zeros((2, 0)))
        self.reward: Array = np.array([tau.reward for tau in taus], float)  # the reward stage shapes it
        self.n = len(taus)

    # ---- trajectories (n,)

    @cached_property
    def group(self) -> Ints:
        """Numbers of those that Eq. 3 compares with each other."""
        return numbers(tau.group for tau in self.taus)

    @cached_property
    def instruction(self) -> Ints:
        return numbers(tau.instruction for tau in self.taus)

    @cached_property
    def question(self) -> Ints:
        return numbers(tau.question.id for tau in self.taus)

    @cached_property
    def correct(self) -> Mask:
        return np.array([not tau.failed for tau in self.taus], bool)

    @cached_property
    def length(self) -> Ints:
        """Action tokens."""
        return np.array([sum(tau.mask) for tau in self.taus], int)

    @cached_property
    def answer(self) -> Ints:
        """Numbers of equal answers, normalized as for exact match; -1 without one."""
        texts = [normalize(tau.prediction or "") for tau in self.taus]
        return np.where([text != "" for text in texts], numbers(texts), -1)

    @cached_property
    def truncated(self) -> Mask:
        """Whether it ended without an answer."""
        return np.array([tau.stop != "answer" for tau in self.taus], bool)

    # ---- turns (n, K)

    @cached_property
    def acted(self) -> Ints:
        """Tokens of each turn; where turns are not recorded, all tokens are one turn."""
        return self.turns([tau.acted or [sum(tau.mask)] for tau in self.taus])

    @cached_property
    def called(self) -> Ints:
        """Whether a tool has answered the turn's call, 1 or 0."""
        return self.turns([[turn.result is not None for turn in tau.turns] for tau in self.taus])

    @cached_property
    def found(self) -> Ints:
        """Whether what the tool returned holds a gold answer, 1 or 0."""
        rows = [[holds_gold(turn.result or [], tau.question.golds) for turn in tau.turns] for tau in self.taus]
        return self.turns(rows)

    @cached_property
    def state(self) -> Ints:
        """Numbers of equal states: the group, and what the turn is the answer to; -1 where there is no turn."""
        seen = [
            [(int(g), "start"), *((int(g), tuple(turn.result or ())) for turn in tau.turns)][: len(tau.turns)]
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
    def turn(self) -> Ints:
        """The turn of each token, counted over the whole batch."""
        return np.repeat(np.arange(self.acted.size), self.acted.ravel())

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
        return np.array([lp for tau in self.taus for lp, m in zip(tau.logps, tau.mask, strict=True) if m], float)

    @cached_property
    def advantage(self) -> Array:
        """A-hat of each trajectory, as `set_advantages` has left it."""
        return np.array([tau.advantage for tau in self.taus], float)

    @cached_property
    def A(self) -> Array:
        """A-hat, as `set_advantages` has left it in the trajectories."""
        if not any(tau.credit for tau in self.taus):
            return self.advantage[self.tau]
        return np.concatenate([np.repeat(tau.credit, tau.acted or [sum(tau.mask)]) for tau in self.taus])

    @property
    def grpo(self) -> Array:
        """Eq. 3 of each trajectory (n,)."""
        return self.each(v.normal, self.reward, self.group)

    # ---- arithmetic

    def mean(self, x: Array | Ints | Mask, of: Ints) -> Array:
        """Returns for each entry of x the mean over those with its number in `of`."""
        out: Array = (np.bincount(of, x) / np.maximum(1, np.bincount(of)))[of]
        return out

    def each(self, f: Callable[[Array], Array], x: Array, of: Ints) -> Array:
        """Returns f of every group of entries; 0 for an entry that is alone in its group."""
        out = np.zeros(len(x))
        for rows in v.groups(of):
            if len(rows) > 1:
                out[rows] = f(x[rows])
        return out

    def per_instruction(self, A: Array) -> Array:
        """Returns A minus its mean over the trajectories of the same instruction.

        A baseline across groups compares instructions too, and would credit tokens for their instruction's words. That
        belongs in the weights of Eq. 6.
        """
        return A - self.mean(A, self.instruction)


def numbers(keys: Iterable[Hashable]) -> Ints:
    """Returns 0, 1, ... for each key, in the order of their first appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], int)


@dataclass(frozen=True)
class Objective:
    """The stages of an objective; the defaults are the paper's (Eq. 2 and 3)."""

    reward: Callable[[Batch], Array] = lambda b: b.reward  # (n,)
    advantage: Callable[[Batch], Array] = lambda b: b.each(group_advantages, b.reward, b.group)  # (n,)
    credit: Callable[[Batch, Array], Array] | None = None  # A (n,) -> (n, K); None: every turn has the trajectory's
    select: Callable[[Batch], Mask] = lambda b: np.ones(len(b.tau), bool)  # (N,): the tokens to train on
    weight: Callable[[Batch, Mask], Array] = v.trajectory_mean  # (N,)
    clip: Callable[[Batch], tuple[Array, Array]] | tuple[float, ...] | None = None  # None: --eps; (): S has no bounds
    columns: Callable[[Batch, Array], v.Columns] = lambda b, w: {}  # w (N,) -> what else the surrogate reads, (N,)
    surrogate: Callable[..., torch.Tensor] = clipped_surrogate


# One line a method: what it does differently from GRPO. docs/objectives.md has the sources.
OBJECTIVES = {
    "grpo": Objective(),
    "dr_grpo": Objective(advantage=v.centred, weight=v.longest_mean),
    "dapo": Objective(reward=v.overlong, select=v.mixed_groups, weight=v.token_mean, clip=(0.2, 0.28)),
    "rloo": Objective(advantage=v.leave_one_out),
    "loop": Objective(advantage=v.leave_one_out, select=v.not_small, clip=(0.1, 0.1)),
    "maxrl": Objective(advantage=v.over_mean),
    "reinforce_baseline": Objective(advantage=v.whitened),
    "spo": Objective(advantage=v.beta_tracker, clip=(0.2, 0.28)),
    "gspo": Objective(columns=v.per_sequence, surrogate=v.gspo, clip=(3e-4, 4e-4)),
    "gspo_turn": Objective(columns=v.per_turn, surrogate=v.gspo, clip=(3e-4, 4e-4), weight=v.turn_mean),
    "cispo": Objective(surrogate=v.cispo, clip=(1.0, 0.28), weight=v.token_mean),
    "cispo_cap": Objective(surrogate=v.cispo, clip=(1.0, 4.0), weight=v.token_mean),
    "sapo": Objective(surrogate=v.sapo, clip=()),
    "dppo": Objective(columns=v.to_engine, surrogate=v.dppo, clip=(0.2, 0.2), weight=v.token_mean),
    "vespo": Objective(columns=v.whole_sequence, surrogate=v.vespo, clip=(), weight=v.token_mean),
    "tis": Objective(weight=v.truncated),
    "r2vpo": Objective(surrogate=v.r2vpo, clip=()),
    "hapo": Objective(
        advantage=v.token_weighted, columns=v.heterogeneity, surrogate=v.hapo, clip=(), weight=v.token_mean
    ),
    "etr": Objective(clip=v.elastic),
    "icpo": Objective(columns=v.by_context, surrogate=v.icpo),
    "llds": Objective(columns=v.fallen, surrogate=v.llds),
    "copo": Objective(advantage=v.consistency),
    "riskpo": Objective(advantage=v.risk),
    "adora": Objective(advantage=v.adora),
    "aspo": Objective(advantage=v.early_search),
    "consistent": Objective(advantage=v.over_paraphrases),
    "empo": Objective(reward=v.majority),
    "hapo_history": Objective(reward=v.shorter_than_before),
    "hbpo": Objective(reward=v.budgeted, advantage=v.across_budgets),
    "mt_grpo": Objective(credit=v.first_result),
    "gigpo": Objective(credit=v.anchored),
    "eapo": Objective(credit=v.discounted, columns=v.per_sequence, surrogate=v.gspo, clip=(3e-4, 4e-4)),
    "rubricem": Objective(credit=v.stage_returns),
    "d3s": Objective(select=v.diverse),
    "espl": Objective(
        advantage=v.centred, select=v.not_small, weight=v.token_mean, clip=(), columns=v.to_engine, surrogate=v.espl
    ),
}


@dataclass(frozen=True)
class ObjectiveConfig(Config):
    """the objective (docs/objectives.md)"""

    objective: str = knob("grpo", "its name; grpo is the paper's Eq. 2 and 3", of=tuple(OBJECTIVES))

    def check(self) -> str:
        if OBJECTIVES[self.objective].clip is not None and self.eps != ObjectiveConfig.eps:
            return f"--eps {self.eps}: --objective {self.objective} has its own; leave it out"
        if self.objective == "consistent" and getattr(self, "rank", "") != "paired":
            return "--objective consistent: compares a question's instructions; run extras/selection.py --rank paired"
        return ""


class ObjectiveLearner(Learner):
    """A Learner with the objective that --objective names in place of Eq. 2 and 3."""

    cfg: ObjectiveConfig

    def __init__(self, model: Any, reference: Any, cfg: ObjectiveConfig, max_gap: float = math.inf):
        super().__init__(model, reference, cfg, max_gap)
        self.surrogate = OBJECTIVES[cfg.objective].surrogate

    @property
    def limit(self) -> int:
        return (self.cfg.max_turns + 1) * self.cfg.max_response

    def set_advantages(self, taus: Sequence[Trajectory]) -> None:
        """Sets `advantage`, and `credit` where turns differ; rewards stay as they are."""
        o, b = OBJECTIVES[self.cfg.objective], Batch(taus, self.limit, self.memory)
        b.reward = o.reward(b)
        A = o.advantage(b)
        credit = o.credit(b, A).tolist() if o.credit else [[]] * b.n
        for tau, a, row in zip(taus, A.tolist(), credit, strict=True):
            tau.advantage, tau.credit = a, row[: len(tau.acted or [1])]

    def terms(self, part: list[Trajectory], old: Array | None) -> Terms:
        o, b = OBJECTIVES[self.cfg.objective], Batch(part, self.limit, old=old, score=partial(self.score, part))
        w = o.weight(b, o.select(b))
        bounds = o.clip(b) if callable(o.clip) else o.clip
        low, high = bounds or (self.cfg.eps, self.cfg.eps)
        old_logp = None if old is None else old[0]
        return {"adv": b.A, "w": w, "old_logp": old_logp, "eps_low": low, "eps_high": high} | o.columns(b, w)


def main(argv: list[str] | None = None) -> None:
    inspo.main(argv, ObjectiveConfig, ObjectiveLearner)


if __name__ == "__main__":
    main()
