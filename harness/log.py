"""A run's parts in one place, and what Algorithm 1 asks of them: questions, rewarded rollouts, evaluations."""

import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
from tqdm import tqdm

from config import Config
from data import Question, f1
from harness.directory import Ledger, Run
from population import Population, ReplayBuffer
from reflect import Optimizer
from rollout import Trajectory


def rng(seed: int, t: int, purpose: str) -> np.random.Generator:
    """Randomness is a function of (seed, step, purpose): there is no state to save."""
    return np.random.default_rng([seed, t, zlib.crc32(purpose.encode())])


@dataclass
class Session:
    """A run's parts, and the three things that Algorithm 1 does with them besides its own bookkeeping."""

    cfg: Config
    run: Run
    train: dict[str, Question]
    test: list[Question]
    roll: Callable  # rollout(jobs=, temperature=, seed=) on the policy in training
    reward: Callable[[Trajectory, Question], float]
    optimizer: Optimizer | None
    P: Population
    B: ReplayBuffer
    bar: tqdm
    ledger: Ledger = field(default_factory=Ledger)

    def questions(self, t: int) -> list[Question]:
        """The batch of step t: epochs over the training set, each in an order of its own."""
        pool, out = list(self.train.values()), []
        first = (t - 1) * self.cfg.batch
        for epoch in range(first // len(pool), (first + self.cfg.batch - 1) // len(pool) + 1):
            order = rng(self.cfg.seed, epoch, "epoch").permutation(len(pool))
            lo, hi = first - epoch * len(pool), first + self.cfg.batch - epoch * len(pool)
            out += [pool[k] for k in order[max(0, lo) : max(0, hi)]]
        return out

    def trajectories(self, jobs: list, t: int, purpose: str, temperature: float | None = None) -> list[Trajectory]:
        """Rollouts of jobs (instruction id, instruction, question, group), with their rewards."""
        seed = int(rng(self.cfg.seed, t, purpose).integers(2**31))
        temperature = self.cfg.temperature if temperature is None else temperature
        taus = self.roll(jobs=jobs, temperature=temperature, seed=seed)
        for tau, (_, _, q, _) in zip(taus, jobs, strict=True):
            tau.reward = self.reward(tau, q)
        return taus

    def evaluate(self, instruction: str, t: int) -> dict[str, float]:
        """Greedy on the held-out questions: EM overall and by source, searches a question."""  # CHOICE-11
        test = self.test[: self.cfg.eval_n or None]
        taus = self.trajectories([(0, instruction, q, k) for k, q in enumerate(test)], t, "evaluate", temperature=0.0)
        scores: dict[str, list[float]] = {"em": [tau.reward for tau in taus]}
        for tau, q in zip(taus, test, strict=True):
            scores.setdefault(f"em/{q.source}", []).append(tau.reward)
        scores["f1"] = [f1(tau.prediction, q.golds) for tau, q in zip(taus, test, strict=True)]
        scores["searches"] = [tau.served for tau in taus]
        return {name: sum(x) / len(x) for name, x in sorted(scores.items())}

    def say(self, t: int, event: str, text: str) -> None:
        """One line on the screen above the progress bar, and the population as it is now in population.jsonl."""
        self.bar.write(f"step {t:3d}  {event:6s}  {text}")
        self.run.log("population", {"t": t, "event": event, "text": text, "P": [asdict(I) for I in self.P.P]})
