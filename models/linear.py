"""Linear layers in float32 on an AMD CPU with AVX-512.

torch asks MKL for these products, which computes them with AVX2 there. oneDNN, which torch asks in
bfloat16, takes half the time (docs/LOG.md, 2026-11-28).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.packing import ROW_MULTIPLE, prefer_onednn


class Linear(nn.Linear):
    """A linear layer; `models.model.speed_up` turns torch's into it."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x @ W.T + bias, (..., out), of x (..., in) and W (out, in)."""
    packed = x.ndim == 3 and len(x) == 1 and x.shape[1] % ROW_MULTIPLE == 0
    if packed and x.is_cpu and x.dtype == torch.float32 and prefer_onednn():
        return Product.apply(x, W, bias)
    return F.linear(x, W, bias)


class Product(torch.autograd.Function):
    """`linear` by oneDNN, for which torch has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, W)
        return multiply(x, W, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, W = ctx.saved_tensors
        x, rows = x.flatten(0, -2), dy.flatten(0, -2)
        of_x, of_W, of_bias = ctx.needs_input_grad
        return (
            multiply(dy, W.T) if of_x else None,
            multiply(rows.T, x.T) if of_W else None,
            rows.sum(0) if of_bias else None,
        )


def multiply(x: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, W, bias, "none", [], "")
