"""LoRA: the policy's weights W are frozen, small matrices A and B are trained; a layer computes
with W + scale * B A.

That sum is one plain weight, which trainer, engine and export share. In bfloat16 it would round
back to W: a step of training is far below half a unit in W's last place. So it is dithered: each
place of W has a number of its own, always the same, that decides from which value on the sum is
rounded up. Averaged over places every step arrives, and with B = 0 the policy is W to the bit.
(Adding B (A x) to W x, as peft and vLLM do, loses steps as rounding W + B A does.)
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.linear import Linear, linear
from plumbing.faults import Fault


class LoRALinear(Linear):
    """A linear layer with adapters; `add` turns a plain one into it."""

    lora_A: Tensor  # (rank, in)
    lora_B: Tensor  # (out, rank)
    dither: Tensor  # (out + in,), 0 to 65,535: entry i + j is for place (i, j) of the weight
    scale: float
    off = False

    def forward(self, x: Tensor) -> Tensor:
        if self.off:
            return super().forward(x)
        return Product.apply(
            x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale, self.dither
        )

    def merge(self, W: Tensor, A: Tensor, B: Tensor) -> Tensor:
        return merge(W, A, B, self.scale, self.dither)


class Product(torch.autograd.Function):
    """y = x W'^T + bias with W' = W + scale * B A; neither W' is kept for the backward pass nor its
    gradient made."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        W: Tensor,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        scale: float,
        dither: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, W, A, B)
        ctx.scale, ctx.dither = scale, dither
        return linear(x, merge(W, A, B, scale, dither), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, W, A, B = ctx.saved_tensors
        dx = linear(dy, merge(W, A, B, ctx.scale, ctx.dither).T)
        rows, d_rows = x.flatten(0, -2), ctx.scale * dy.flatten(0, -2)
        dA, dB = (d_rows @ B).T @ rows, d_rows.T @ (rows @ A.T)
        return dx, None, None, dA, dB, None, None


def merge(W: Tensor, A: Tensor, B: Tensor, scale: float, dither: Tensor) -> Tensor:
    """Returns W + scale * B A in the dtype of W (out, in), in bfloat16 dithered."""
    A, B = A.to(W.dtype), B.to(W.dtype)
    if W.dtype != torch.bfloat16:
        return torch.addmm(W, B, A, alpha=scale)
    total = W.float().add_(B @ A, alpha=scale)
    # The upper half of a float32 is a bfloat16: whatever carries over from the lower one rounds it
    # up.
    total.view(torch.int32).add_(dither.as_strided(W.shape, (1, 1)))
    return total.view(torch.bfloat16)[:, 1::2].contiguous()


def add(model: Any, rank: int, alpha: int, seed: int = 0, dithers: int = 1) -> Any:
    """Freezes a model and puts float32 adapters on every linear layer but the head, in place;
    returns it.

    A is random and B zero, so that the model computes what it did before. With `rank` 0 it adds
    none. Unless it `dithers`, a merged weight is rounded. Raises Fault where no layer takes adapters.
    """
    if not rank:
        return model
    head = model.get_output_embeddings()
    plain = [
        layer
        for layer in model.modules()
        if type(layer) in (nn.Linear, Linear) and layer is not head
    ]
    if not plain:
        raise Fault(f"--lora_rank {rank}: the model has no linear layer; train all its weights")
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for layer in plain:
        (n_out, n_in), device = layer.weight.shape, layer.weight.device
        A = nn.init.kaiming_uniform_(torch.empty(rank, n_in), a=5**0.5, generator=generator)
        dither = torch.randint(2**16, (n_out + n_in,), generator=generator, dtype=torch.int32)
        if not dithers:
            dither.fill_(2**15)  # which rounds to the nearest
        layer.__class__ = LoRALinear
        layer.scale = alpha / rank
        layer.lora_A = nn.Parameter(A.to(device))
        layer.lora_B = nn.Parameter(torch.zeros(n_out, rank, device=device))
        layer.register_buffer("dither", dither.to(device), persistent=False)
    return model
