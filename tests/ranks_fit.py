"""Run by torchrun: two updates of a policy cut over all ranks; each rank writes the bytes that it has of each part.

    torchrun --nproc_per_node=2 tests/ranks_fit.py CONFIG OUT        # CONFIG: directory with a Hugging Face config.json

The parts are those of `fit.estimate`, by its names; gradients are measured right before the optimizer's step, and
"most" is the most that the second update had at a time beside policy, moments and the reference's shares.
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

from grpo import Learner
from rollout import Trajectory
from training.model import fill, load_config, shard, skeleton


def storage(t: torch.Tensor):
    return (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()


class Live(TorchDispatchMode):
    """Bytes of the storages that operations touch, all but those of `known` tensors: now, and at most."""

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
                s = t._local_tensor.untyped_storage() if isinstance(t, DTensor) else t.untyped_storage()
                if s._cdata not in self.keys and s._cdata not in self.alive:
                    self.alive[s._cdata] = weakref.ref(s)
                    weakref.finalize(s, self.alive.pop, s._cdata, None)
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:  # FSDP2 frees by resizing: what a storage had at first does not count
        return sum(s.nbytes() for s in (ref() for ref in list(self.alive.values())) if s is not None)


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages of this rank's shares, with what FSDP2 has padded."""
    return sum({s.data_ptr(): s.nbytes() for s in map(storage, tensors)}.values())


def measure(config, source) -> dict[str, int]:
    model = fill(shard(skeleton(config), "cpu", compute=torch.bfloat16), source)
    reference = fill(shard(skeleton(config, torch.bfloat16), "cpu", frozen=True), source)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    learner = Learner(
        model, reference, lr=1e-3, T=10, warmup=0.2, eps=0.2, beta=0.1, temperature=1.0, loss_agg="trajectory",
        micro_tokens=256,
    )  # fmt: skip
    dice = random.Random(0)
    taus = [Trajectory(0, "q", k // 2, [dice.randrange(99) for _ in range(128)], 28) for k in range(8)]
    for tau in taus:  # two micro-batches a rank
        tau.mask, tau.logps = [0] * 28 + [1] * 100, [0.0] * 128
    A = {id(tau): dice.uniform(-1, 1) for tau in taus}
    measured = {}

    def before_step(*_) -> None:
        measured["gradients (float32 shares)"] = local_bytes(p.grad for p in model.parameters())

    learner.optimizer.register_step_pre_hook(before_step)
    learner.update(1, [taus], A)
    shares = list(reference.parameters())
    assert all(isinstance(p, DTensor) for p in shares)  # nothing of it stays gathered
    moments = [state[name] for state in learner.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    with Live([*model.parameters(), *moments, *shares]) as live:
        learner.update(2, [taus], A)
    return measured | {
        "policy (float32 shares)": local_bytes(model.parameters()),
        "moments of AdamW (float32 shares)": local_bytes(moments),
        "reference (bfloat16 shares)": local_bytes(shares),
        "most": live.most,
    }


def main(path: str, out: Path) -> None:
    dist.init_process_group("gloo")
    config = load_config(path)
    source = AutoModelForCausalLM.from_config(config) if dist.get_rank() == 0 else None
    measured = measure(config, source)
    gc.collect()  # its models go before the group: gloo's threads abort otherwise
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
