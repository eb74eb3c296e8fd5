"""Several processes as one: rank 0 runs Algorithm 1 and calls, every rank does its share and answers.

Under `torchrun` the other ranks only `follow`. What they are told and what they answer goes over gloo; the tensors of a
call (gradients, weights) over the collectives that its work consists of.
"""

import datetime
import gc
import os
import signal
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from rollout import EngineFault, SearchDown, Trajectory

PASSED_ON = (SearchDown, EngineFault)  # faults after which all ranks can still go on together


class Ranks:
    """This process among all; `grouped` says whether there is a process group (with a GPU there always is one)."""

    def __init__(self, device: str, minutes: float):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.nodes = self.size // int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.device, self.grouped = device, self.size > 1 or device == "cuda"
        if not self.grouped:
            return
        wait = datetime.timedelta(minutes=minutes)  # for every collective, so that nothing hangs for ever
        if device == "cuda":
            local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
            if local >= there:
                sys.exit(f"{local + 1} processes on a machine with {there} GPUs: lower --nproc_per_node")
            torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group(backend, timeout=wait, **alone)
        self.orders = dist.new_group(backend="gloo", timeout=wait)
        if self.rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0 to hear

    def tell(self, order) -> None:
        dist.broadcast_object_list([order], 0, self.orders)

    def hear(self):
        box = [None]
        dist.broadcast_object_list(box, 0, self.orders)
        return box[0]

    def gather(self, answer) -> list:
        """The answers of all ranks, on rank 0."""
        answers = [None] * self.size if self.rank == 0 else None
        dist.gather_object(answer, answers, 0, self.orders)
        return answers

    def leave(self) -> None:
        """The end, for all ranks; the caller has let go of its models, whose streams gloo's threads abort with."""
        if self.grouped:
            gc.collect()  # a sharded model refers to itself
            dist.barrier(self.orders)
            dist.destroy_process_group()


class Team:
    """All ranks' workers as rank 0 sees them."""

    def __init__(self, ranks: Ranks, engine: str, make):
        self.ranks, self.busy = ranks, False
        if ranks.size > 1:
            ranks.tell(engine)
        self.worker = make(engine)

    def ask(self, name: str, *arguments) -> list:
        """Every rank's result of worker.name(*arguments), by rank; a fault of one is raised when all have ended."""
        if self.ranks.size == 1:
            return [getattr(self.worker, name)(*arguments)]
        self.busy, stop = True, []
        # Ctrl-C waits until all ranks are through: in a collective it would leave the others waiting for this one.
        before = signal.signal(signal.SIGINT, lambda *_: stop.append(True))
        try:
            self.ranks.tell((name, arguments))
            answers = self.ranks.gather(_try(self.worker, name, arguments))
        finally:
            signal.signal(signal.SIGINT, before)
        self.busy = False
        if stop:
            raise KeyboardInterrupt
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def rollout(self, search, jobs: list, temperature: float, seed: int) -> list[Trajectory]:
        """A trajectory for each job, in their order; every rank plays its share."""
        shares = self.ask("rollout", ",".join(search.urls), jobs, temperature, seed)
        return [tau for _, tau in sorted((one for share in shares for one in share), key=lambda one: one[0])]

    def update(self, t: int, minibatches: list[list[Trajectory]], A: dict[int, float]) -> dict[str, float]:
        """One step of the policy by all ranks; the metrics are those of the whole batch."""
        order = [A[id(tau)] for part in minibatches for tau in part]
        if self.ranks.size > 1:  # the texts are not needed there
            minibatches = [[replace(tau, turns=[], response="") for tau in part] for part in minibatches]
        return self.ask("update", t, minibatches, order)[0]

    def dismiss(self) -> None:
        """The others leave as well, unless they are in the middle of something: then torchrun ends them."""
        if not self.busy:
            if self.ranks.size > 1:
                self.ranks.tell(None)
            self.worker.close()
            del self.worker
            self.ranks.leave()


def follow(ranks: Ranks, make) -> None:
    """What a rank but 0 does: make its worker when rank 0 makes its own, then what it is told, until it may go."""
    if not (engine := ranks.hear()):
        return
    worker = make(engine)
    while order := ranks.hear():
        ranks.gather(_try(worker, *order))
    worker.close()
    del worker
    ranks.leave()


def _try(worker, name: str, arguments: tuple):
    try:
        return getattr(worker, name)(*arguments)
    except PASSED_ON as e:
        return e
