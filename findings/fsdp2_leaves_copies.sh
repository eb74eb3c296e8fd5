#!/bin/bash
# torch 2.13.0, FSDP2: after a forward pass without backward, such as a validation, parameters() of the root module are
# no longer the sharded ones. They are plain gathered copies in mixed precision's bfloat16 until the next backward pass
# or state_dict(). An optimizer that is made in between never trains the root's own weights, usually embedding, last
# norm and head, and whoever reads these weights reads rounded ones. model.reshard() or reshard_after_forward=True for
# the root avoids it.
#
# Seen on 2026-11-27, Python 3.11, Linux, one process (2.15.0: the same):
#     before            layer DTensor float32, head DTensor float32
#     after validation  layer DTensor float32, head Parameter bfloat16
#     an optimizer made then changes the layer, not the head
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile torch==2.13.0 numpy==2.3.5
venv/bin/python - <<'EOF'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.layer(x))


def kind(parameter):
    return type(parameter).__name__, parameter.dtype


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model, x = Model(), torch.randn(2, 4)
mesh, policy = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
fully_shard(model.layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
first = {name: weight.to_local().clone() for name, weight in model.state_dict().items()}
print("before", kind(model.layer.weight), kind(model.head.weight))
assert kind(model.head.weight) == ("DTensor", torch.float32)

with torch.no_grad():
    model(x)
print("after validation", kind(model.layer.weight), kind(model.head.weight))
assert kind(model.layer.weight) == ("DTensor", torch.float32)
assert kind(model.head.weight) == ("Parameter", torch.bfloat16)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(x).square().sum().backward()
optimizer.step()
moved = {name: not torch.equal(weight.to_local(), first[name]) for name, weight in model.state_dict().items()}
print("an optimizer made then changes", moved)
assert moved["layer.weight"] and not moved["head.weight"] and not moved["head.bias"]
dist.destroy_process_group()
EOF
