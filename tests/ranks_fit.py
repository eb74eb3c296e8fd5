"""Run by torchrun: one update of a policy cut over all ranks; each rank writes the bytes that it has of each part.

    torchrun --nproc_per_node=2 tests/ranks_fit.py CONFIG OUT        # CONFIG: directory with a Hugging Face config.json

The parts are those of `fit.estimate`, by its names; gradients are measured right before the optimizer's step.
"""

import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from grpo import Learner
from policy import fill, load_config, shard, skeleton
from rollout import Trajectory


def local_bytes(tensors) -> int:
    """Of the storages of this rank's shares, with what FSDP2 has padded."""
    storages = {t.data_ptr(): t.nbytes() for t in (t.to_local().untyped_storage() for t in tensors)}
    return sum(storages.values())


def measure(config, source) -> dict[str, int]:
    model = fill(shard(skeleton(config), "cpu", compute=torch.bfloat16), source)
    reference = fill(shard(skeleton(config, torch.bfloat16), "cpu"), source)
    learner = Learner(
        model, reference, lr=1e-3, T=10, warmup=0.2, eps=0.2, beta=0.1, temperature=1.0, loss_agg="trajectory",
        micro_tokens=40,
    )  # fmt: skip
    measured = {}

    def before_step(*_) -> None:
        measured["gradients (float32 shares)"] = local_bytes(p.grad for p in model.parameters())

    learner.optimizer.register_step_pre_hook(before_step)
    dice = random.Random(0)
    taus = [Trajectory(0, "q", k // 2, [dice.randrange(99) for _ in range(30)], 9) for k in range(8)]
    for tau in taus:
        tau.mask, tau.logps = [0] * 9 + [1] * 21, [0.0] * 30
    learner.update(1, [taus], {id(tau): dice.uniform(-1, 1) for tau in taus})
    moments = [state[name] for state in learner.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    whole = [p for p in reference.parameters() if not isinstance(p, DTensor)]
    measured["reference (embedding and head, gathered for good)"] = sum(p.nbytes for p in whole)
    reference.reshard()
    return measured | {
        "reference (bfloat16 shares)": local_bytes(reference.parameters()),
        "policy (float32 shares)": local_bytes(model.parameters()),
        "moments of AdamW (float32 shares)": local_bytes(moments),
    }


def main(path: str, out: Path) -> None:
    dist.init_process_group("gloo")
    config = load_config(path)
    source = AutoModelForCausalLM.from_config(config) if dist.get_rank() == 0 else None
    measured = measure(config, source)  # its models are gone before the group is: gloo's threads abort otherwise
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
