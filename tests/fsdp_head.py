"""Run by torchrun: the GRPO head in a module that FSDP2 shards over two processes, against one
process."""

import gc
import json
import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from kernels import grpo_head


class Head(torch.nn.Module):
    """The vocabulary projection with the loss; FSDP2 gathers the weight for `forward`."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden, targets, **tokens):
        return grpo_head(hidden, self.weight, targets, beta=0.04, chunk=10, **tokens)[0]


def measure(rank):
    """Returns how far loss and gradients are off, by name."""
    g = torch.Generator().manual_seed(0)
    N, H, V = 37, 16, 1187
    hidden, weight = torch.randn(N, H, generator=g), torch.randn(V, H, generator=g)
    targets = torch.randint(V, (N,), generator=g)
    tokens = {"adv": torch.randn(N, generator=g), "token_weight": torch.rand(N, generator=g)}
    tokens |= {
        "old_logp": -8 + torch.rand(N, generator=g),
        "ref_logp": -8 + torch.rand(N, generator=g),
    }

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    # uneven; w holds the averages, so the parts add up
    mine = slice(0, 20) if rank == 0 else slice(20, N)
    errors = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        whole, X = Head(weight.to(dtype).float()), hidden.to(dtype, copy=True).requires_grad_()
        loss = whole(X, targets, **tokens)
        loss.backward()

        # By default FSDP2 would cast old_logp and ref_logp to bf16 too.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        sharded = fully_shard(Head(weight.clone()), mesh=mesh, mp_policy=policy)
        x = hidden[mine].to(dtype, copy=True).requires_grad_()
        part = sharded(x, targets[mine], **{k: v[mine] for k, v in tokens.items()})
        (2 * part).backward()  # FSDP2 averages over the ranks
        total = part.detach().clone()
        dist.all_reduce(total)
        dW = sharded.weight.grad.full_tensor()
        errors |= {
            f"{name} loss": abs(total.item() / loss.item() - 1),
            f"{name} dW": ((dW - whole.weight.grad).norm() / whole.weight.grad.norm()).item(),
            f"{name} dX": (
                (x.grad / 2 - X.grad[mine]).float().norm() / X.grad[mine].float().norm()
            ).item(),
        }
    return errors


def main() -> None:
    dist.init_process_group("gloo")
    errors = measure(dist.get_rank())
    gc.collect()  # gloo's threads abort if a model, which refers to itself, outlives the group
    assert all(map(math.isfinite, errors.values()))
    if dist.get_rank() == 0:
        print(json.dumps(errors), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
