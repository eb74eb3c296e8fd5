"""Counts what Python dispatches for a micro-batch on fake CUDA tensors: a JSON object, by setting.

    python tests/fake_cuda/count.py GUARD

The micro-batch is 7 trajectories in 2 groups, with the reference's pass. Operations and autograd's
nodes are those of one more layer of Qwen2.5's. In an update of four micro-batches the first three
are held; nothing is with --gather 0.
"""

# ruff: noqa: I001
import json
from types import MethodType, SimpleNamespace

from run import FAKE, ShardingPropagator, outside, pretend  # first: it loads the GUARD
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch
import torch.distributed as dist
from transformers import Qwen2Config

from config import Config
from extras.bench.update import count_operations, draw_row
from grpo import Learner
from models.packing import fuse
from models.model import hold, forward_packed, shard, skeleton
from extras.fit import KNOWN

SHAPE = KNOWN["Qwen/Qwen2.5-0.5B"]


def build(layers: int, way: str, recompute: bool) -> Learner:
    models = []
    for frozen in (False, True):
        dtype = torch.bfloat16 if frozen or way == "whole" else torch.float32
        model = outside(skeleton)(Qwen2Config(**SHAPE | {"num_hidden_layers": layers}), dtype)
        fuse(model)
        if way == "whole":
            model.to_empty(device="cuda").forward_packed = MethodType(forward_packed, model)
        else:
            how = {"compute": torch.bfloat16, "frozen": frozen, "gather": way == "gathered"}
            shard(model, "cuda", **how)
        models.append(model)
    if recompute:
        models[0].gradient_checkpointing_enable({"use_reentrant": False})
    return Learner(*models, Config(dtype="bfloat16", T=10))


def count(layers: int, way: str, recompute: bool) -> SimpleNamespace:
    """Returns the mean of four micro-batches, after two that are not counted."""
    learner = build(layers, way, recompute)
    learner.model.train()
    taus = draw_row(21000, True, 1000)
    rows = []
    for place in range(6):
        if way == "gathered":
            hold(learner.model, place not in (1, 5))
        row = count_operations(learner, taus)
        rows += [row] * (place > 1)
    return SimpleNamespace(**{name: layers * sum(r[name] for r in rows) / 4 for name in rows[0]})


def main() -> None:
    pretend(1, "9.0")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    dist.device_mesh.init_device_mesh = outside(dist.device_mesh.init_device_mesh)
    shapes_of = "_propagate_tensor_meta_non_cached"
    setattr(ShardingPropagator, shapes_of, outside(getattr(ShardingPropagator, shapes_of)))
    found = {}
    with FAKE:
        for way in ("gathered", "blocks", "whole"):
            for recompute in (False, True):
                few, more = (count(layers, way, recompute) for layers in (2, 4))
                found[f"{way}, {'recomputed' if recompute else 'kept'}"] = {
                    "operations": (more.ops - few.ops) / 2,
                    "nodes": (more.nodes - few.nodes) / 2,
                }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
