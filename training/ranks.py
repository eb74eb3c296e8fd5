"""Several processes as one: rank 0 runs Algorithm 1 and calls, every rank does its part and answers.

Calls and answers are Python objects over gloo; gradients and weights use the collectives of the work itself.
"""

import datetime
import gc
import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from faults import Fault


class Ranks:
    """This process among all of them; `grouped` is whether there is a process group (on a GPU there always is)."""

    def __init__(self, device: str, patience: float):
        """`patience`: minutes after which a collective gives up, so that no rank waits for ever."""
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.nodes = self.size // int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.device, self.grouped = device, self.size > 1 or device == "cuda"
        if not self.grouped:
            return
        timeout = datetime.timedelta(minutes=patience)
        if device == "cuda":
            local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
            if local >= count:
                raise Fault(f"{local + 1} processes on a machine with {count} GPUs: lower --nproc_per_node")
            torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group(backend, timeout=timeout, **alone)
        self.calls = dist.new_group(backend="gloo", timeout=timeout)
        if self.rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C

    def broadcast(self, message: Any = None) -> Any:
        """Returns rank 0's message on every rank."""
        box = [message]
        dist.broadcast_object_list(box, 0, self.calls)
        return box[0]

    def gather(self, answer: Any) -> list[Any]:
        """Returns the answers of all ranks on rank 0, [] elsewhere."""
        answers = [None] * self.size if self.rank == 0 else None
        dist.gather_object(answer, answers, 0, self.calls)
        return answers or []

    def leave(self) -> None:
        """Shuts down all ranks. Drop the models first: gloo's threads abort if a model's streams are still alive."""
        if self.grouped:
            gc.collect()  # a sharded model refers to itself
            dist.barrier(self.calls)
            dist.destroy_process_group()
