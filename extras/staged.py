"""The control for evolving along with training: train, evolve with the policy frozen, train; as
many rollouts in all.

    python extras/fork.py --parts extras.staged:Staged,extras.staged:Late --T_e 54

The policy trains for a quarter of the T steps, is frozen for half of them, in which all evolutions
fall, and trains for the last quarter.
"""

from dataclasses import replace

from grpo import Learner
from inspo import Evolution


class Staged(Learner):
    """Skips the updates of the middle half; the learning rate is that of a run of T/2 steps."""

    def __init__(self, model, reference, cfg, **kw):
        super().__init__(model, reference, replace(cfg, T=cfg.T // 2), **kw)

    def update(self, t, minibatches):
        half = self.cfg.T
        if half // 2 < t <= half // 2 + half:
            return {"lr": 0.0}
        return super().update(t if t <= half // 2 else t - half, minibatches)


class Late(Evolution):
    """Leaves out the evolutions of the first quarter; `--T_e` ends them after the third."""

    def evolve(self, t, policy):
        if t > self.cfg.T // 4:
            super().evolve(t, policy)
