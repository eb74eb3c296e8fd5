"""The policy in training, on all ranks: rank 0 calls a method here, and every rank's `Worker` runs its part of it."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from config import Config
from data import rng
from rollout import Job, Trajectory, spread
from tools import Search, make_tools
from training.ranks import Ranks
from training.worker import Worker, attempt

S = ParamSpec("S")
R = TypeVar("R")


class Policy:
    """pi_theta: what Algorithm 1 does with it, and what a run needs besides. Made on rank 0 alone."""

    def __init__(self, cfg: Config, ranks: Ranks, engine: str, search: Search):
        self.cfg, self.ranks = cfg, ranks
        self.t = 0  # the last step whose update has begun
        self.memory: dict[str, Any] = {}  # what the objective remembers from step to step
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by what they were spent on
        self.in_step = True  # whether all ranks wait for the next call
        self.progress: Callable[[str, int, int], None] = lambda purpose, done, total: None  # told of rollouts under way
        tools = make_tools(cfg, search)
        if ranks.size > 1:
            ranks.broadcast((engine, ",".join(search.urls)))
        self.worker = Worker(cfg, ranks, engine, tools)

    def rollout(self, t: int, purpose: str, jobs: Sequence[Job], temperature: float | None = None) -> list[Trajectory]:
        """Returns a trajectory for each job, in their order; `purpose` tells the random draws of one step apart."""
        began = time.time()
        seed = int(rng(self.cfg.seed, t, purpose).integers(2**31))
        temperature = self.cfg.temperature if temperature is None else temperature
        size, total = self.ranks.size, len(jobs)  # this rank speaks for the others
        self.worker.progress = lambda done: self.progress(purpose, min(done * size, total), total)
        whole = None if purpose != "evaluate" else frozenset(spread(len(jobs), self.cfg.compare))
        shares = self.on_all_ranks(Worker.rollout, list(jobs), temperature, seed, whole)
        numbered = sorted((pair for share in shares for pair in share), key=lambda pair: pair[0])
        self.seconds[purpose.split()[0]] += time.time() - began
        return [tau for _, tau in numbered]

    def update(self, t: int, taus: Sequence[Trajectory]) -> dict[str, float]:
        """Takes step t of GRPO on the rewarded trajectories (Eq. 2); returns the metrics of the whole batch.

        `tokens` of a sample of the trajectories, --token_rows in whole groups, then holds what the update saw of them.
        """
        began, self.t = time.time(), t
        groups = list(dict.fromkeys(tau.group for tau in taus))
        watched = {groups[k] for k in spread(len(groups), math.ceil(self.cfg.token_rows / self.cfg.G))}
        sent = list(taus)
        for tau in taus:
            tau.watched = tau.group in watched
        if self.ranks.size > 1:  # the other ranks do not need the texts
            sent = [replace(tau, turns=[], response="") for tau in taus]
        answers = self.on_all_ranks(Worker.update, t, sent)
        for _, noted in answers:
            for k, tokens in noted.items():
                taus[k].tokens = tokens
        self.seconds["update"] += time.time() - began
        return answers[0][0]

    def save(self, path: Path) -> dict[str, str]:
        """Writes weights and optimizer into a directory, for any number of ranks to load; returns files' digests."""
        shares = self.on_all_ranks(Worker.save, path.absolute())
        return {name: digest for share in shares for name, digest in share.items()}

    def damage(self, path: Path) -> list[str]:
        """Returns what is wrong with the files of a checkpoint; [] if they are as they were written."""
        return [fault for share in self.on_all_ranks(Worker.damage, path.absolute()) for fault in share]

    def load(self, path: Path, t: int) -> None:
        """Restores what `save` wrote after step t."""
        self.on_all_ranks(Worker.load, path.absolute())
        self.t = t

    def export(self, path: Path) -> None:
        """Writes a plain Hugging Face directory."""
        self.on_all_ranks(Worker.export, path.absolute())

    def reset(self) -> None:
        """Restores the first policy, for evaluation alone: the optimizer keeps its moments."""
        self.on_all_ranks(Worker.reset)

    def faults(self) -> int:
        """Returns how many requests to tools have failed on all ranks."""
        return sum(self.on_all_ranks(Worker.faults))

    def on_all_ranks(self, method: Callable[Concatenate[Worker, S], R], *args: S.args, **kwargs: S.kwargs) -> list[R]:
        """Returns method(worker, *args) of every rank, by rank; raises a rank's fault once all have finished."""
        if self.ranks.size == 1:
            return [method(self.worker, *args, **kwargs)]
        self.in_step = False
        self.ranks.broadcast((method, args, kwargs))
        answers = self.ranks.gather(attempt(method, self.worker, *args, **kwargs))
        self.in_step = True
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self) -> None:
        """Ends all ranks, unless one is inside a collective: then torchrun ends them."""
        if self.in_step:
            if self.ranks.size > 1:
                self.ranks.broadcast(None)
            self.worker.close()
            del self.worker
            self.ranks.leave()
