"""A run in which rank 1 fails inside a gradient reduction, with an exit handler that waits for all
ranks as vLLM's."""

import atexit
import os

import torch.distributed as dist

import inspo
from grpo import Learner
from training.shards import blocks

loss = Learner.loss


def failing(self, batch, *args):
    def fail(*_):
        raise MemoryError("out of memory, say")

    if os.environ["RANK"] == "1":  # the last block's gradients are being reduced by then
        blocks(self.model)[0].register_full_backward_pre_hook(fail)
    return loss(self, batch, *args)


Learner.loss = failing
atexit.register(lambda: dist.is_initialized() and dist.barrier())
inspo.main()
