"""What the policy is trained towards: 34 published variants of GRPO beside Eq. 2 and 3.

    python extras/objectives.py --objective gspo      # and the flags of inspo.py; docs/objectives.md lists all

An objective is a line of `OBJECTIVES` below: it names the stages in which it differs from GRPO. Each stage is a
function of a `Batch`, the trajectories as columns; those of the variants are in variants.py. Two calls run them:

    set_advantages   a step's trajectories, on rank 0:  reward -> advantage -> credit over turns
    Objective.terms  a mini-batch's, on every rank:     selection -> weights -> tokens -> clip bounds -> ratio

What `terms` returns are arguments of the GRPO head (kernels/head.py), which knows no objective's name.
"""

if not __package__:
    import root  # noqa: F401
from plumbing import stop  # noqa: F401  # isort: skip  (first: from here on a Ctrl-C is one line)
import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from config import Config, knob, parse
from extras import variants as v
from grpo import Learner, Terms, group_advantages
from inspo import train
from tasks import Trajectory
from tasks.questions import normalize

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Batch:
    """n trajectories with N action tokens and at most K turns, as columns (n,), (n, K) or, one after another, (N,)."""

    def __init__(
        self, taus: Sequence[Trajectory], limit: int = 0, memory: dict[str, Any] | None = None,
        old: Array | None = None, entropy: Array | None = None, now: Array | None = None,
    ):  # fmt: skip
        """`limit`: tokens that a trajectory may sample; `memory`: what an objective remembers from step to step.

        `old`, `entropy`: log-probs and entropies (N,) under pi_old; `now`: log-probs under the policy in training.
        None: the objective does not read them, or all three policies are the same.
        """
        self.taus, self.limit, self.memory = taus, limit, {} if memory is None else memory
        self.old, self.entropy, self.now = old, entropy, now
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
        """Tokens of each turn; where the turns are not told, all tokens are one."""
        return self.turns([tau.acted or [sum(tau.mask)] for tau in self.taus])

    @cached_property
    def called(self) -> Ints:
        """Whether a tool has answered the turn's call, 1 or 0."""
        return self.turns([[turn.result is not None for turn in tau.turns] for tau in self.taus])

    @cached_property
    def found(self) -> Ints:
        """Whether what the tool returned holds a gold answer, 1 or 0."""

        def holds(result: list[str] | None, golds: Iterable[str]) -> bool:
            text = f" {normalize(' '.join(result or []))} "
            return any(f" {gold} " in text for gold in map(normalize, golds) if gold)

        return self.turns([[holds(turn.result, tau.question.golds) for turn in tau.turns] for tau in self.taus])

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
    def engine(self) -> Array:
        """Log-probs under the engine's policy."""
        return np.array([lp for tau in self.taus for lp, m in zip(tau.logps, tau.mask, strict=True) if m], float)

    @cached_property
    def A(self) -> Array:
        """A-hat, as `set_advantages` has left it in the trajectories."""
        if not any(tau.credit for tau in self.taus):
            return np.array([tau.advantage for tau in self.taus], float)[self.tau]
        return np.concatenate([np.repeat(tau.credit, tau.acted or [sum(tau.mask)]) for tau in self.taus])

    # ---- arithmetic

    def mean(self, x: Array | Ints | Mask, of: Ints) -> Array:
        """Returns for each entry of x the mean over those with its number in `of`."""
        out: Array = (np.bincount(of, x) / np.maximum(1, np.bincount(of)))[of]
        return out

    def each(self, f: Callable[[Array], Array], x: Array, of: Ints) -> Array:
        """Returns f of every group of entries; whoever is alone in a group has nobody to be compared with: 0."""
        out, order = np.zeros(len(x)), np.argsort(of, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(of[order])) + 1):
            if len(rows) > 1:
                out[rows] = f(x[rows])
        return out

    def per_instruction(self, A: Array) -> Array:
        """Returns A minus its mean over the trajectories of the same instruction.

        A baseline across groups compares instructions too, and the better one's tokens would be trained for its words:
        their difference belongs in the weights of Eq. 6.
        """
        return A - self.mean(A, self.instruction)


def numbers(keys: Iterable[Hashable]) -> Ints:
    """Returns 0, 1, ... for each key, in the order of their first appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], int)


# ---- the stages of Eq. 2 and 3


def raw(b: Batch) -> Array:
    return b.reward


def standardized(b: Batch) -> Array:
    return b.each(group_advantages, b.reward, b.group)


def trajectory_mean(b: Batch, keep: Mask) -> Array:
    """Returns w (N,): the average over a trajectory's tokens, the group, the mini-batch (Eq. 2)."""
    counts = np.bincount(b.tau[keep], minlength=b.n)
    n = b.n - np.count_nonzero((counts == 0) & (b.length > 0))  # a trajectory without any token still counts
    return np.where(keep, 1 / np.maximum(1, counts[b.tau] * n), 0)  # Eq.2 CHOICE-9


def token_mean(b: Batch, keep: Mask) -> Array:
    """Returns w (N,): the average over the mini-batch's tokens, verl's default."""
    w: Array = keep / max(1, int(np.count_nonzero(keep)))
    return w


@dataclass(frozen=True)
class Objective:
    """The stages of an objective; the defaults are the paper's (Eq. 2 and 3)."""

    reward: Callable[[Batch], Array] = raw  # (n,)
    advantage: Callable[[Batch], Array] = standardized  # (n,)
    credit: Callable[[Batch, Array], Array] | None = None  # A (n,) -> (n, K); None: every turn has the trajectory's
    select: Callable[[Batch], Mask] | None = None  # (N,): the tokens to train on; None: all
    weight: Callable[[Batch, Mask], Array] | None = None  # (N,); None: what --loss_agg says
    tokens: Callable[[Batch, Array], Array] | None = None  # w (N,) -> advantages (N,); None: those of the turns
    clip: Callable[[Batch], tuple[Array, Array]] | tuple[float, float] | None = None  # None: --eps on both sides
    ratio: Callable[[Batch], Array | None] | None = None  # (N,): the log-probs that rho compares with; None: pi_old's
    kind: str = "clip"  # of the head's loss
    delta: float = math.inf  # of the head
    tis: float = 0.0  # weight tokens by min(pi_old / pi_engine, this); 0: no weight
    reads: tuple[str, ...] = ()  # "old": pi_old's columns in a step's first mini-batch too; "now": in the later ones
    eps: float = 0.2
    limit: int = 0  # tokens that a trajectory may sample

    def terms(self, b: Batch) -> Terms:
        """Returns what the head takes for the N tokens of a mini-batch; "old_logp" None: the ratio is 1."""
        keep = self.select(b) if self.select else np.ones(len(b.tau), bool)
        w = (self.weight or trajectory_mean)(b, keep)
        adv = self.tokens(b, w) if self.tokens else b.A
        low, high = self.clip(b) if callable(self.clip) else self.clip or (self.eps, self.eps)
        old = self.ratio(b) if self.ratio else b.old
        if self.tis and b.old is not None:
            w = w * np.exp(b.old - b.engine).clip(max=self.tis)
        return {
            "adv": adv, "w": w, "old_logp": old, "pi_old": b.old, "eps_low": low, "eps_high": high,
            "delta": self.delta, "kind": self.kind,
        }  # fmt: skip


# One line a method: what it does differently from GRPO. docs/objectives.md has the sources.
OBJECTIVES = {
    "grpo": Objective(),
    "dr_grpo": Objective(advantage=v.centred, weight=v.longest_mean),
    "dapo": Objective(reward=v.overlong, select=v.mixed_groups, weight=token_mean, clip=(0.2, 0.28)),
    "rloo": Objective(advantage=v.leave_one_out),
    "loop": Objective(advantage=v.leave_one_out, select=v.not_small, clip=(0.1, 0.1)),
    "maxrl": Objective(advantage=v.over_mean),
    "reinforce_baseline": Objective(advantage=v.whitened),
    "spo": Objective(advantage=v.beta_tracker, clip=(0.2, 0.28)),
    "gspo": Objective(ratio=v.per_sequence, clip=(3e-4, 4e-4), weight=trajectory_mean, reads=("now",)),
    "gspo_turn": Objective(ratio=v.per_turn, clip=(3e-4, 4e-4), weight=v.turn_mean, reads=("now",)),
    "cispo": Objective(kind="cispo", clip=(1.0, 0.28), weight=token_mean),
    "cispo_cap": Objective(kind="cispo", clip=(1.0, 4.0), weight=token_mean),
    "sapo": Objective(kind="sapo", clip=(1.05, 1.0), weight=trajectory_mean),
    "dppo": Objective(kind="dppo", clip=(0.2, 0.2), ratio=v.to_engine, weight=token_mean),
    "vespo": Objective(kind="reinforce", tokens=v.variational, weight=token_mean, reads=("now",)),
    "tis": Objective(tis=2.0, reads=("old",)),
    "r2vpo": Objective(kind="quadratic", clip=(0.04, 0.04)),
    "hapo": Objective(
        advantage=v.token_weighted,
        tokens=v.entropy_scaled,
        clip=v.entropy_bounds,
        weight=token_mean,
        reads=("old", "now"),
    ),
    "etr": Objective(clip=v.elastic),
    "icpo": Objective(tokens=v.imitated, ratio=v.steered_on_policy, delta=3.0, reads=("old", "now")),
    "llds": Objective(tokens=v.kept_likely, reads=("now",)),
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
    "eapo": Objective(credit=v.discounted, ratio=v.per_sequence, clip=(3e-4, 4e-4), reads=("now",)),
    "rubricem": Objective(credit=v.stage_returns),
    "d3s": Objective(select=v.diverse, reads=("old",)),
    "espl": Objective(
        advantage=v.centred,
        select=v.not_small,
        weight=token_mean,
        clip=(1.0, float("inf")),
        ratio=v.to_engine,
    ),
}


@dataclass(frozen=True)
class ObjectiveConfig(Config):
    """the objective (docs/objectives.md)"""

    PROGRAM: ClassVar[str] = "extras/objectives.py"
    objective: str = knob("grpo", "its name; grpo is the paper's Eq. 2 and 3", of=tuple(OBJECTIVES))
    loss_agg: str = knob(
        "trajectory", "trajectory: Eq. 2's average; token: verl's token mean; where --objective has none of its own",
        of=("trajectory", "token"),
    )  # fmt: skip
    tis: float = knob(
        0.0, "truncated importance sampling: weight tokens by min(pi_old / pi_engine, this); 0 disables", least=0
    )

    def check(self) -> str:
        own = OBJECTIVES[self.objective]
        for name, taken in (("eps", own.clip), ("loss_agg", own.weight), ("tis", own.tis)):
            if taken and getattr(self, name) != getattr(ObjectiveConfig, name):
                return f"--{name} {getattr(self, name)}: --objective {self.objective} has its own; leave it out"
        return ""


def objective_of(cfg: ObjectiveConfig) -> Objective:
    """Returns the objective that --objective names, with the flags that fill what it leaves open."""
    named = OBJECTIVES[cfg.objective]
    average = {"trajectory": trajectory_mean, "token": token_mean}[cfg.loss_agg]
    tis = cfg.tis or named.tis
    return replace(
        named, weight=named.weight or average, eps=cfg.eps, limit=(cfg.max_turns + 1) * cfg.max_response,
        tis=tis, reads=(*named.reads, "old") if tis else named.reads,
    )  # fmt: skip


def set_advantages(taus: Sequence[Trajectory], objective: Objective, memory: dict[str, Any] | None = None) -> None:
    """Sets `advantage`, and `credit` where turns differ, of a step's trajectories; their rewards stay as they are.

    `memory`: what an objective remembers from step to step, plain data for the checkpoint; it is updated.
    """
    b = Batch(taus, objective.limit, memory)
    b.reward = objective.reward(b)
    A = objective.advantage(b)
    credit = objective.credit(b, A).tolist() if objective.credit else [[]] * b.n
    for tau, a, row in zip(taus, A.tolist(), credit, strict=True):
        tau.advantage, tau.credit = a, row[: len(tau.acted or [1])]


class ObjectiveLearner(Learner):
    """A Learner with the objective that --objective names in place of Eq. 2 and 3."""

    def __init__(self, model: Any, reference: Any, cfg: ObjectiveConfig, max_gap: float = math.inf):
        super().__init__(model, reference, cfg, max_gap)
        self.objective = objective_of(cfg)

    def set_advantages(self, taus: Sequence[Trajectory]) -> None:
        set_advantages(taus, self.objective, self.memory)

    def pi_old(self, part: list[Trajectory], share: list[list[int]], k: int) -> Array | None:
        return self.score(part, share) if k > 0 or "old" in self.objective.reads else None

    def terms(self, part: list[Trajectory], share: list[list[int]], k: int, old: Array | None) -> Terms:
        now = None
        if "now" in self.objective.reads:
            now = self.score(part, share) if k > 0 else old
        logp, entropy = (None, None) if old is None else old
        batch = Batch(part, self.objective.limit, old=logp, entropy=entropy, now=None if now is None else now[0])
        return self.objective.terms(batch)


def main(argv: list[str] | None = None) -> None:
    cfg = parse(argv, ObjectiveConfig)
    if cfg.objective == "consistent" and os.environ.get("RANK", "0") == "0":
        print("note: no question has several instructions, so consistent is grpo here; extras/selection.py --rank"
              " paired --objective consistent asks each under two", flush=True)  # fmt: skip
    train(cfg, learner=ObjectiveLearner)


if __name__ == "__main__":
    main()
