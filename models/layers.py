"""Liger's Triton kernels in place of a model's RMSNorm, rotary embedding and SwiGLU, which are a
dozen eager ops each.

Only the modules of one model are changed, never transformers' classes or functions: the same
process may hold a copy on the CPU, where Triton cannot run, and a vLLM. Names of parameters stay,
and the projections stay modules that are called, with whatever adapters they carry. For batches of
one row, as `forward_packed` makes them: in a batch with one token a row, as generation has, Liger
0.8.5 can rotate the wrong row (Gemma 3).
"""

from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch


class Family(NamedTuple):
    """How the layers of one of transformers' families compute."""

    prefix: str  # of the names of its classes
    offset: float = 0.0  # RMSNorm multiplies by offset + weight
    casting: str = "llama"  # RMSNorm rounds before it multiplies by the weight; gemma: after
    # nothing else reads the gradient of a norm's output, so that it may be overwritten
    own_gradient: bool = True


FAMILIES = {  # config.model_type -> Family; the tests compare each with transformers
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "llama": Family("Llama"),
    "mistral": Family("Mistral"),
    "granite": Family("Granite"),
    # a norm's output joins the residual stream
    "gemma3_text": Family("Gemma3", 1.0, "gemma", own_gradient=False),
}


def fuse(model: Any) -> str:
    """Replaces the layers of `model` that Liger can compute; returns which, or why none, for the
    start-up text."""
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as RMSNorm
        from liger_kernel.ops.rope import LigerRopeFunction as Rope
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as SiLUMul
    except ImportError:
        return "none (liger-kernel is not installed)"
    config = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"none ({config.model_type} is not among {', '.join(FAMILIES)})"

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        out: torch.Tensor = RMSNorm.apply(
            x, self.weight, eps, family.offset, family.casting, family.own_gradient
        )
        return out

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(SiLUMul.apply(self.gate_proj(x), self.up_proj(x)))
        return out

    def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        # in place: q and k are a projection's output, or a norm's
        return Rope.apply(q, k, cos, sin)

    replaced = {}
    for module in model.modules():
        kind = type(module).__name__.removeprefix(family.prefix)
        if kind == "RMSNorm":
            replaced["RMSNorm"] = module.forward = MethodType(norm, module)
        elif kind == "MLP" and getattr(config, "hidden_act", "") in ("silu", "swish"):
            replaced["SwiGLU"] = module.forward = MethodType(mlp, module)
        elif kind == "Attention":
            forward = _with_global(type(module).forward, "apply_rotary_pos_emb", rotary)
            replaced["rotary embedding"] = module.forward = MethodType(forward, module)
    return f"{', '.join(replaced)} (Liger)"


def _with_global(function: Any, name: str, value: Any) -> FunctionType:
    """Returns a copy of a function in which the global `name` is `value`."""
    copy = FunctionType(
        function.__code__,
        function.__globals__ | {name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
