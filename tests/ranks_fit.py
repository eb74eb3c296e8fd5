"""Run by torchrun: two updates of a policy sharded over all ranks; each rank writes the bytes that
each part takes.

    torchrun --nproc_per_node=2 tests/ranks_fit.py CONFIG OUT        # CONFIG: directory with a Hugging Face config.json

Parts have the names of `extras.fit.estimate`. Gradients are measured right before the optimizer's
step. "most" is the peak of the second update, without policy, moments and the reference's shares.
"""

import gc
import json
import random
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from config import Config
from grpo import Learner
from models.model import fill, load_config, skeleton
from tasks import Question, Trajectory
from training.shards import shard


def storage(t: torch.Tensor):
    return (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations touch, except those of `known` tensors: now,
    and the maximum."""

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self.known = [storage(t) for t in known]
        self.keys = {s._cdata for s in self.known}
        self.alive: dict[int, weakref.ref] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves((out, args, kwargs)):
            if isinstance(t, torch.Tensor):
                s = (
                    t._local_tensor.untyped_storage()
                    if isinstance(t, DTensor)
                    else t.untyped_storage()
                )
                if s._cdata not in self.keys and s._cdata not in self.alive:
                    self.alive[s._cdata] = weakref.ref(s)
                    weakref.finalize(s, self.alive.pop, s._cdata, None)
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:  # not from creation: FSDP2 frees by resizing
        return sum(
            s.nbytes() for s in (ref() for ref in list(self.alive.values())) if s is not None
        )


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of this rank's shares, with FSDP2's padding."""
    return sum({s.data_ptr(): s.nbytes() for s in map(storage, tensors)}.values())


def measure(config, source) -> dict[str, int]:
    model = fill(shard(skeleton(config), "cpu", compute=torch.bfloat16), source)
    reference = fill(shard(skeleton(config, torch.bfloat16), "cpu", frozen=True), source)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    learner = Learner(
        model, reference, Config(lr=1e-3, beta=0.1, temperature=1.0, micro_tokens=256)
    )
    rng, question = random.Random(0), Question("q", "Who?", ("x",), "")
    taus = [
        Trajectory(0, question, k // 2, [rng.randrange(99) for _ in range(128)], 28)
        for k in range(8)
    ]
    for tau in taus:  # two micro-batches per rank
        tau.mask, tau.logps, tau.advantage = [0] * 28 + [1] * 100, [0.0] * 128, rng.uniform(-1, 1)
    measured = {}

    def before_step(*_) -> None:
        measured["gradients (float32 shards)"] = local_bytes(p.grad for p in model.parameters())

    learner.optimizer.register_step_pre_hook(before_step)
    learner.update(1, [taus])
    shares = list(reference.parameters())
    assert all(isinstance(p, DTensor) for p in shares)  # none stays gathered
    moments = [
        state[name]
        for state in learner.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    with Live([*model.parameters(), *moments, *shares]) as live:
        learner.update(2, [taus])
    return measured | {
        "policy (float32 shards)": local_bytes(model.parameters()),
        "moments of AdamW (float32 shards)": local_bytes(moments),
        "reference (bfloat16 shards)": local_bytes(shares),
        "most": live.most,
    }


def main(path: str, out: Path) -> None:
    dist.init_process_group("gloo")
    config = load_config(path)
    source = None
    if dist.get_rank() == 0:
        source = AutoModelForCausalLM.from_config(config)
        source.row_kind = "shared"  # as `probe` finds
    measured = measure(config, source)
    gc.collect()  # gloo's threads abort if a model outlives the group
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
