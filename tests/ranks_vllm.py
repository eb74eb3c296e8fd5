"""Run by torchrun, or alone: vLLM with the weights of a policy that FSDP2 has cut over the ranks.

    torchrun --nproc_per_node=2 tests/ranks_vllm.py POLICY [URLS]

Every rank has its own engine; with URLS all use those servers. Each prints the largest difference
between the engine's log-probabilities and the sharded trainer's, after a first load and after a
second one with other weights.
"""

import gc
import json
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from tiny_model import STOP
from torch.distributed.tensor import DTensor

from engines.vllm_engine import VllmEngine
from models.model import fill, load_config, load_model, load_tokenizer, skeleton, weights
from models.packing import Packing
from training.shards import shard


@torch.no_grad()
def error(engine, model, tokenizer, rank: int) -> float:
    """Returns the largest difference between engine and trainer, over turns of this rank's own."""
    contexts = {
        row: tokenizer(f"What is the mayor of the city {rank} {row}?")["input_ids"]
        for row in range(4)
    }
    engine.reset(rank)
    turns = list(engine.generate(contexts, 12, 0.8))
    while len(turns) < len(contexts):
        turns += engine.generate({}, 12, 0.8)
    worst = 0.0
    for row, ids, logps, _ in turns:
        whole, n = torch.tensor(contexts[row] + ids), len(contexts[row])
        rows, targets = torch.arange(n - 1, len(whole) - 1), whole[n:]
        wanted = model.forward_packed(whole, Packing([len(whole)]), rows, targets, 0.8)[0]
        worst = max(worst, (wanted - torch.tensor(logps)).abs().max().item())
    return worst


def main() -> None:
    path, *urls = sys.argv[1:]
    ranks, rank = "RANK" in os.environ, 0
    if ranks:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    config, tokenizer = load_config(path), load_tokenizer(path)
    source = load_model(path) if rank == 0 else None
    model = fill(shard(skeleton(config), "cpu"), source) if ranks else source
    if urls:
        from store_transfer import Server

        engine = Server(SimpleNamespace(model=path, longest=500), tokenizer, STOP, urls[0])
    else:
        engine = VllmEngine(path, tokenizer, STOP, max_len=500, dtype="float32", memory=0.1)
    errors = []
    for _ in range(2):
        engine.load(weights(model))
        errors.append(error(engine, model, tokenizer, rank))
        with torch.no_grad():
            for p in model.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).mul_(1.1)
    print(json.dumps({"rank": rank, "errors": errors}), flush=True)
    engine.close()
    del model, source, engine
    gc.collect()  # gloo's threads abort if a model outlives the group
    if ranks:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
