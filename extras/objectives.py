"""What the policy is trained towards: 21 published variants of GRPO, besides Eq. 2 and 3.

    python extras/objectives.py --objective gspo      # and the flags of inspo.py; docs/objectives.md lists all

An objective is a line of `OBJECTIVES` below: it names the stages in which it differs from GRPO,
functions in variants.py. Most are functions of a `Batch`, the trajectories as columns; the
surrogate is one of n tokens, in torch.

    set_advantages   a step's trajectories, on rank 0:  reward -> advantage -> credit over turns
    terms            a mini-batch's, on every rank:     selection -> weights -> clip bounds -> further columns
    surrogate        S (n,) of some tokens, in place of Eq. 2's `clipped_surrogate`
"""

if not __package__:
    import root  # noqa: F401
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic.dataclasses import dataclass

import inspo
from config import Config
from extras import variants as v
from extras.batch import Array, Batch, Mask, turn_lengths
from grpo import Learner, LossInputs
from kernels import clipped_surrogate
from plumbing.files import Row
from tasks import Trajectory


class Objective(NamedTuple):
    """The stages of an objective; the defaults are the paper's (Eq. 2 and 3)."""

    reward: Callable[[Batch], Array] = lambda b: b.reward  # (n,)
    advantage: Callable[[Batch], Array] = lambda b: b.grpo  # A (n,)
    # A (n,) -> that of each turn (n, K); None: every turn has the trajectory's
    credit: Callable[[Batch, Array], Array] | None = None
    # (N,): the tokens to train on
    select: Callable[[Batch], Mask] = lambda b: np.ones(len(b.tau), bool)
    weight: Callable[[Batch, Mask], Array] = v.trajectory_mean  # (N,)
    # None: --eps on both sides; (): the surrogate has no bounds
    clip: tuple[float, ...] | None = None
    # token weights (N,) -> what else the surrogate reads, (N,) each
    columns: Callable[[Batch, Array], v.Columns] = lambda b, w: {}
    surrogate: Callable[..., torch.Tensor] = clipped_surrogate


# One line a method: what it does differently from GRPO. docs/objectives.md has the sources.
OBJECTIVES = {
    "grpo": Objective(),
    "dr_grpo": Objective(advantage=v.centred, weight=v.longest_mean),
    "dapo": Objective(
        reward=v.overlong, select=v.mixed_groups, weight=v.token_mean, clip=(0.2, 0.28)
    ),
    "rloo": Objective(advantage=v.leave_one_out),
    "loop": Objective(advantage=v.leave_one_out, select=v.not_small, clip=(0.1, 0.1)),
    "maxrl": Objective(advantage=v.over_mean),
    "reinforce_baseline": Objective(advantage=v.whitened),
    "spo": Objective(advantage=v.beta_tracker, clip=(0.2, 0.28)),
    "gspo": Objective(columns=v.per_sequence, surrogate=v.gspo, clip=(3e-4, 4e-4)),
    "cispo": Objective(surrogate=v.cispo, clip=(1.0, 0.28), weight=v.token_mean),
    "cispo_cap": Objective(surrogate=v.cispo, clip=(1.0, 4.0), weight=v.token_mean),
    "sapo": Objective(surrogate=v.sapo, clip=()),
    "dppo": Objective(columns=v.to_engine, surrogate=v.dppo, clip=(0.2, 0.2), weight=v.token_mean),
    "vespo": Objective(columns=v.whole_sequence, surrogate=v.vespo, clip=(), weight=v.token_mean),
    "tis": Objective(weight=v.truncated),
    "r2vpo": Objective(surrogate=v.r2vpo, clip=()),
    "aspo": Objective(advantage=v.early_search),
    "consistent": Objective(advantage=v.over_paraphrases),
    "empo": Objective(reward=v.majority),
    "mt_grpo": Objective(credit=v.first_result),
    "gigpo": Objective(credit=v.anchored),
    "espl": Objective(
        advantage=v.centred,
        select=v.not_small,
        weight=v.token_mean,
        clip=(),
        columns=v.to_engine,
        surrogate=v.espl,
    ),
}


@dataclass(frozen=True)
class ObjectiveConfig(Config):
    """the objective (docs/objectives.md)"""

    objective: str = "grpo"
    """its name; grpo is the paper's Eq. 2 and 3"""

    def find_fault(self) -> str:
        if self.objective not in OBJECTIVES:
            return f"--objective {self.objective}: choose {', '.join(OBJECTIVES)}"
        if OBJECTIVES[self.objective].clip is not None and self.eps != ObjectiveConfig.eps:
            return f"--eps {self.eps}: --objective {self.objective} has its own; leave it out"
        if self.objective == "consistent" and getattr(self, "groups", "") != "question":
            return "--objective consistent: compares a question's instructions; extras/selection.py --groups question"
        return ""


class ObjectiveLearner(Learner):
    """A Learner with the objective that --objective names in place of Eq. 2 and 3."""

    cfg: ObjectiveConfig
    whole_step: Sequence[Trajectory] = ()

    def __init__(self, model: Any, reference: Any, cfg: ObjectiveConfig, max_gap: float = math.inf):
        super().__init__(model, reference, cfg, max_gap)
        self.surrogate = OBJECTIVES[cfg.objective].surrogate

    @property
    def limit(self) -> int:
        return (self.cfg.max_turns + 1) * self.cfg.max_response

    def set_advantages(self, taus: Sequence[Trajectory]) -> None:
        """Sets `advantage`, and an attribute `credit` where turns differ; rewards stay as they are."""
        o = OBJECTIVES[self.cfg.objective]
        b = Batch(taus, self.limit, self.remembered)
        b.reward = o.reward(b)
        A = o.advantage(b)
        credit = o.credit(b, A).tolist() if o.credit else [[]] * b.n
        for tau, a, row in zip(taus, A.tolist(), credit, strict=True):
            tau.advantage = a
            vars(tau)["credit"] = row[: len(turn_lengths(tau))]

    def update(self, t: int, minibatches: list[list[Trajectory]]) -> Row:
        self.whole_step = [tau for minibatch in minibatches for tau in minibatch]
        return super().update(t, minibatches)

    def make_loss_inputs(self, minibatch: list[Trajectory], old: Array | None) -> LossInputs:
        o = OBJECTIVES[self.cfg.objective]
        score = partial(self.score_tokens, minibatch)
        b = Batch(minibatch, self.limit, old=old, score=score, step=self.whole_step)
        w = o.weight(b, o.select(b))
        inputs = (
            super().make_loss_inputs(minibatch, old)
            | {"adv": b.A, "token_weight": w}
            | o.columns(b, w)
        )
        if o.clip:
            inputs["eps_low"], inputs["eps_high"] = o.clip
        return inputs


def main(argv: list[str] | None = None) -> None:
    inspo.main(argv, ObjectiveConfig, ObjectiveLearner)


if __name__ == "__main__":
    main()
