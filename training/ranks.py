"""Several processes as one: rank 0 runs Algorithm 1 and calls, every rank does its part and
answers.

Calls and answers are Python objects over gloo; gradients and weights use the collectives of the
work itself.
"""

import contextlib
import datetime
import gc
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from plumbing import stop
from plumbing.faults import Fault, tell_torchrun
from plumbing.outside import printable
from plumbing.stop import Stopped

WEEK = datetime.timedelta(weeks=1)
# Without it, micro-batches of many sizes leave holes in memory; vLLM turns it off around its own
# memory. CUDA reads it when it is first used, as for a GPU's capability.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


class Ranks:
    """This process among all of them; `grouped` is whether there is a process group: always on a
    GPU and in bf16."""

    def __init__(self, device: str, patience: float, dtype: str = "float32"):
        """`patience`: minutes after which a collective gives up, so that no rank waits for ever.

        With a `dtype` below float32 FSDP keeps the weights in float32 and gathers blocks in
        `dtype`, even for one process. Rank 0's holds for all: processors of several kinds would
        choose differently.
        """
        self.rank, self.size = int(os.environ.get("RANK", 0)), stop.count_ranks()
        self.device, self.dtype = device, dtype
        self.grouped = self.size > 1 or device == "cuda" or dtype != "float32"
        self.saves: Any = None  # the group of the threads that write checkpoints
        if not self.grouped:
            return
        timeout = datetime.timedelta(minutes=patience)
        if device == "cuda":
            local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
            if local >= count:
                raise Fault(
                    f"{local + 1} processes on a machine with {count} GPUs: lower --nproc_per_node"
                )
            torch.cuda.set_device(local)
            # cuDNN's attention, which torch prefers on Hopper, builds a plan of tens of ms for
            # every new shape.
            torch.backends.cuda.enable_cudnn_sdp(False)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group(backend, timeout=timeout, **alone)
        # Rank 0 may be busy with a slow optimizer or judge for longer than any rank takes for a
        # call.
        self.calls, self.answers, self.saves = (
            dist.new_group(backend="gloo", timeout=patience)
            for patience in (WEEK, timeout, timeout)
        )
        self.dtype = self.broadcast(dtype)

    def broadcast(self, message: Any = None) -> Any:
        """Returns rank 0's message on every rank."""
        box = [message]
        if self.size > 1:
            dist.broadcast_object_list(box, 0, self.calls)
        return box[0]

    def gather(self, answer: Any) -> list[Any]:
        """Returns the answers of all ranks on rank 0, [] elsewhere."""
        if self.size == 1:
            return [answer]
        answers = [None] * self.size if self.rank == 0 else None
        dist.gather_object(answer, answers, 0, self.answers)
        return answers or []

    @contextlib.contextmanager
    def fail_at_once(self) -> Iterator[None]:
        """Ends this process on any exception, so that torchrun ends the others instead of letting
        them wait.

        No exit handlers run: vLLM's would close a process group in which other ranks still wait for
        this one.
        """
        try:
            yield
        except BaseException as e:
            if self.size == 1:
                self.leave()  # the caller may train again
                raise
            if isinstance(e, Fault) or (isinstance(e, Stopped) and not self.rank):
                text = printable(str(e))
                tell_torchrun(text)
                print(text, file=sys.stderr)
            elif not self.rank or not stop.requested():
                # else torchrun ends this rank by a signal: its fault says nothing
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def leave(self) -> None:
        """Shuts down all ranks. Drop the models first: gloo's threads abort if a model's streams
        are still alive."""
        if self.grouped and dist.is_initialized():
            gc.collect()  # a sharded model refers to itself
            dist.barrier(self.answers)
            dist.destroy_process_group()
