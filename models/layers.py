"""Liger's Triton kernels in place of a model's RMSNorm, rotary embedding and SwiGLU, which are a
dozen eager ops each.

Only the modules of one model are changed, never transformers' classes or functions: the same
process may hold a copy on the CPU, where Triton cannot run, and a vLLM. Names of parameters stay,
and the projections stay modules that are called, with whatever adapters they carry. For batches of
one row, as `forward_packed` makes them: in a batch with one token a row, as generation has, Liger
0.8.5 can rotate the wrong row (Gemma 3).
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from models.packing import Packing, attend

FAMILIES = {  # config.model_type -> prefix of its classes; the tests compare each with transformers
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "mistral": "Mistral",
    "granite": "Granite",
    "gemma3_text": "Gemma3",
}
# How RMSNorm computes: it multiplies by offset + weight, rounds before that (llama) or after it
# (gemma), and may overwrite the gradient of its output. Gemma's joins the residual stream.
PLAIN, GEMMA = (0.0, "llama", True), (1.0, "gemma", False)


def fuse(model: Any) -> str:
    """Replaces the layers of `model` that Liger can compute; returns which, or why none, for the
    start-up text."""
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as RMSNorm
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as SiLUMul
    except ImportError:
        return "none (liger-kernel is not installed)"
    config = model.config
    prefix = FAMILIES.get(config.model_type)
    if prefix is None:
        return f"none ({config.model_type} is not among {', '.join(FAMILIES)})"

    def norm(self: Any, x: Tensor) -> Tensor:
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return RMSNorm.apply(x, self.weight, eps, *(GEMMA if prefix == "Gemma3" else PLAIN))

    def mlp(self: Any, x: Tensor) -> Tensor:
        rows = x.squeeze(0)
        gated = SiLUMul.apply(self.gate_proj(rows), self.up_proj(rows))
        return self.down_proj(gated).unsqueeze(0)

    replaced = {}
    for module in model.modules():
        kind = type(module).__name__.removeprefix(prefix)
        if kind == "RMSNorm":
            replaced["RMSNorm"] = module.forward = MethodType(norm, module)
        elif kind == "MLP" and getattr(config, "hidden_act", "") in ("silu", "swish"):
            replaced["SwiGLU"] = module.forward = MethodType(mlp, module)
        elif kind == "Attention":
            replaced["rotary embedding"] = module.forward = MethodType(attention, module)
    return f"{', '.join(replaced)} (Liger)"


def attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    packing: Packing,
    **_: Any,
) -> tuple[Tensor, None]:
    """The forward pass of a family's attention module on a packed row, (1, T, H) -> (1, T, H).

    Written out, since without the batch dimension torch dispatches a quarter fewer operations.
    """
    rows = hidden_states.squeeze(0)
    heads = len(rows), -1, self.head_dim
    q, k, v = (f(rows).view(heads) for f in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = Rotation.apply(q, k, *position_embeddings)
    # Mistral's modules leave it to the config
    window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
    out = attend(q, k, v, packing, window, self.scaling)
    return self.o_proj(out.flatten(1)).unsqueeze(0), None


class Rotation(torch.autograd.Function):
    """Queries and keys (T, heads, dim) turned by the angles of their positions, whose cosines and
    sines are (1, T, dim); in place, since they are a projection's output, or a norm's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.tables = cos, sin
        return rotate(q, k, cos, sin, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.tables
        return *rotate(dq.contiguous(), dk.contiguous(), cos, sin, back=True), None, None


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """Launches Liger's kernel, whose own function takes and returns transposed tensors."""
    from liger_kernel.ops.rope import _triton_rope
    from triton import next_power_of_2

    T, heads, dim = q.shape
    sizes = heads, k.shape[1], dim
    padded = [next_power_of_2(n) for n in (*sizes, cos.shape[-1])]
    _triton_rope[(T,)](
        q,
        q.stride(0),
        k,
        k.stride(0),
        cos,
        cos.stride(-2),
        sin,
        sin.stride(-2),
        T,
        1,
        1,
        *sizes,
        *padded,
        cos.shape[-1],
        BLOCK_SIZE=max(padded[:2]),
        BACKWARD_PASS=back,
    )
    return q, k
