"""Run by torchrun: the learner on a policy that FSDP2 has cut over all ranks; writes what it
computes.

    torchrun --nproc_per_node=2 tests/ranks_learner.py POLICY "BATCHES --out OUT [--load D] [FLAGS]" ...

Each job takes two updates on BATCHES, a pickle of (Config, mini-batches). OUT gets result.pt (metrics
and weights, by rank 0), `dcp/` with the state after the first update, and `policy/`. With --load that
state replaces the first update.
"""

import argparse
import gc
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from grpo import Learner
from models import lora
from models.model import (
    adapted_layers,
    export,
    fill,
    load_config,
    load_model,
    load_tokenizer,
    skeleton,
    weights,
)
from training.policy import load_tensors
from training.shards import blocks, shard


def compare(sent: torch.Tensor, layer: lora.LoRALinear, _: object) -> None:
    """Asserts that a layer, gathered, computes with what an engine is sent, to the bit."""
    computed = lora.merge(layer.weight, layer.lora_A, layer.lora_B, layer.scale, layer.dither)
    assert torch.equal(sent.to(computed.dtype), computed)


def main() -> None:
    job = argparse.ArgumentParser()
    job.add_argument("batches")
    job.add_argument("--out", type=Path)
    for flag in ("bf16", "recompute", "gather"):
        job.add_argument(f"--{flag}", action="store_true")
    job.add_argument("--load")
    policy, *jobs = sys.argv[1:]
    dist.init_process_group("gloo")
    for words in jobs:
        compute(policy, job.parse_args(words.split()))
        gc.collect()  # before the group is gone: gloo's threads abort otherwise
        dist.barrier()
    dist.destroy_process_group()


def compute(policy: str, args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    cfg, minibatches = pickle.loads(Path(args.batches).read_bytes())
    config, source = load_config(policy), load_model(policy) if rank == 0 else None
    cfg = replace(cfg, gather=int(args.gather))
    reference = skeleton(config, torch.float32)
    reference = fill(shard(reference, "cpu", frozen=True, gather=args.gather), source)
    model = skeleton(config, torch.float32)
    for whole in [model] + [source] * (rank == 0):
        lora.add(whole, cfg.lora_rank, cfg.lora_alpha)
    dtype = torch.bfloat16 if args.bf16 else None
    model = fill(shard(model, "cpu", compute=dtype, gather=args.gather), source)
    plain = dict(source.named_parameters()) if source else {}
    for (name, whole), (_, copy) in zip(weights(model), weights(reference), strict=True):
        assert torch.equal(whole, copy.to(whole.dtype)) and (
            source is None or torch.equal(copy, plain[name])
        )
    shares = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert len(blocks(model)) == config.num_hidden_layers
    assert shares <= whole / dist.get_world_size() * 1.2 + 1000, (shares, whole)
    if args.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    learner = Learner(model, reference, cfg)
    metrics = []
    if args.load:
        load_tensors(learner.state_dict(), Path(args.load), alone=False)
    else:
        metrics.append(learner.update(1, minibatches))
        writer = dcp.HuggingFaceStorageWriter(str(args.out / "dcp"), save_distributed=True)
        dcp.save(learner.state_dict(), storage_writer=writer)
    metrics.append(learner.update(2, minibatches))
    final = {name: tensor.clone() for name, tensor in weights(model)}
    for name, layer in adapted_layers(model).items():
        layer.register_forward_pre_hook(partial(compare, final[name]))
    learner.score_tokens(minibatches[0][:1])
    export(
        config,
        model,
        load_tokenizer(policy),
        args.out / "policy" if rank == 0 else None,
        torch.float32,
    )
    if rank == 0:
        torch.save({"metrics": metrics, "weights": final}, args.out / "result.pt")


if __name__ == "__main__":
    main()
