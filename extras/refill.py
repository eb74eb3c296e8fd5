"""Dynamic sampling, as DAPO does it (arXiv 2503.14476): a group with right answers alone, or wrong
ones, has no advantage; other questions take its place.

    python extras/refill.py --objective dapo      # or any of objectives.py, and the flags of inspo.py

After a step's draw there are at most 3 more of `--batch` questions, until `--batch` groups are
mixed. Every trajectory counts for w and may enter B; an update takes `--batch` groups, the mixed
ones first, so that a step has as many optimizer updates as without.
"""

if not __package__:
    import root  # noqa: F401
from copy import copy
from dataclasses import replace

import numpy as np

import inspo
from extras.batch import Batch
from extras.objectives import ObjectiveConfig, ObjectiveLearner
from population import Population
from tasks.task import rng_of, set_rewards


class Refilling:
    """A Policy whose training rollouts draw again and come with their rewards, and whose updates
    leave surplus groups out."""

    def __init__(self, cfg, task, policy, evolution):
        self.cfg, self.task, self.policy, self.evolution = cfg, task, policy, evolution

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def rollout(self, t, purpose, jobs):
        taus = self.policy.rollout(t, purpose, jobs)
        if purpose != "rollout":
            return taus
        set_rewards(self.task, taus)
        D, n = list(self.evolution.D.values()), self.cfg.batch
        for draw in range(1, 4):
            if Batch(taus, 0).mixed.sum() >= n * self.cfg.G:
                break
            rng = rng_of(self.cfg.seed, t, f"refill {draw}")
            questions = [D[k] for k in rng.integers(len(D), size=n)]
            jobs = self.evolution.P.draw_jobs(rng, questions, self.cfg.G)
            jobs = [replace(job, group=job.group + draw * n) for job in jobs]
            further = self.policy.rollout(t, f"refill {draw}", jobs)
            set_rewards(self.task, further)
            taus += further
        return taus

    def update(self, t, taus):
        mixed_first = np.argsort(~Batch(taus, 0).mixed, kind="stable")
        kept = mixed_first[: self.cfg.batch * self.cfg.G]
        return self.policy.update(t, [taus[k] for k in kept])


def refilled(cfg, task, policy, evolution, *others):
    """Algorithm 1 with such a policy, and a task that does not score its rollouts again."""
    policy = Refilling(cfg, task, policy, evolution)
    scored = copy(task)
    scored.reward = lambda taus: [tau.reward for tau in taus]
    return inspo.inspo(cfg, scored, policy, evolution, *others)


def main(argv: list[str] | None = None) -> None:
    inspo.main(argv, ObjectiveConfig, ObjectiveLearner, Population, inspo.Evolution, refilled)


if __name__ == "__main__":
    main()
