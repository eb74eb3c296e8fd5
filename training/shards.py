"""A policy whose weights are sharded over the ranks (FSDP2), and the layers that it computes on a
GPU by Liger's Triton kernels.

With several ranks, or a GPU, every rank holds a share of each parameter in float32 and gathers a
block at a time in the compute dtype.
"""

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from config import Config
from kernels.flash import find_flash_attention_4
from models import lora
from models.model import fill, forward_packed, load_config, materialize, skeleton
from models.packing import Packing, attend
from training.ranks import Ranks

# prefixes of transformers' classes; the tests compare each with transformers
FUSED = "Qwen2", "Qwen3", "Llama", "Mistral", "Gemma3"
# How RMSNorm computes: it multiplies by offset + weight, rounds before that (llama) or after it
# (gemma), and may overwrite the gradient of its output. Gemma's joins the residual stream.
PLAIN, GEMMA = (0.0, "llama", True), (1.0, "gemma", False)


def choose_dither_seed(cfg: Config, ranks: Ranks) -> int | None:
    """Returns the seed with which weights in training are dithered; None: they are not. LoRA
    dithers what it merges."""
    dithered = cfg.dither and ranks.dtype == "bfloat16" and not cfg.lora_rank  # CHOICE-33
    return cfg.seed if dithered else None


def shard_models(first: Any, cfg: Config, ranks: Ranks) -> tuple[Any, Any]:
    """Returns this rank's shares of the policy to train and of pi_ref (FSDP2), both with the
    weights of `first`.

    There is no second model where pi_ref is not needed, or is the policy without its adapters.
    """
    config, compute = load_config(cfg.model), getattr(torch, ranks.dtype)
    kept = compute if cfg.lora_rank else torch.float32  # frozen weights take no small steps
    trained = lora.add(skeleton(config, kept), cfg.lora_rank, cfg.lora_alpha)
    frozen = skeleton(config, compute) if cfg.beta and not cfg.lora_rank else None

    # only updates are computed with these layers: their batches are one row
    if ranks.device == "cuda" and cfg.fused_layers:
        fused = fuse(trained)
        if frozen:
            fuse(frozen)
        if ranks.rank == 0:
            attention = "FlashAttention-4" if find_flash_attention_4() else "torch's"
            print(f"fused layers: {fused}; attention: {attention}")

    gather = cfg.gather == 1
    shard(trained, ranks.device, compute=compute, gather=gather)
    fill(trained, first, choose_dither_seed(cfg, ranks))
    if frozen:
        shard(frozen, ranks.device, frozen=True, gather=gather)
        fill(frozen, first)
    return trained, frozen


def blocks(model: Any) -> list[torch.nn.Module]:
    """Returns the decoder layers: the units of FSDP's gathering and of activation checkpointing."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def shard(
    model: Any,
    device: str,
    *,
    compute: torch.dtype | None = None,
    frozen: bool = False,
    gather: bool = False,
) -> Any:
    """Shards a model from `skeleton` over all ranks, in place; returns it with uninitialized
    weights, for `fill`.

    `compute`: dtype in which blocks are gathered and run (None: the model's own). `frozen`: for a
    model that is never trained; gathered weights are freed right after use. `gather`: weights stay
    gathered until `reshard`, or until a backward pass that `defer_sync` does not hold.
    """
    model.forward_packed = MethodType(forward_packed, model)
    if frozen and dist.get_world_size() == 1:
        return materialize(model, device)  # one rank has the whole: there is nothing to gather
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    # cast_forward_inputs would also cast the log-probs that enter the loss
    precision = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # None is FSDP's default: it keeps the root's weights gathered for the backward pass
    freed = False if gather else frozen or None
    # the root holds embedding, last norm and head, which are needed together
    for part in [*blocks(model), model]:
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=freed)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no averaging reduction
        if dist.get_world_size() > 1:  # on one rank FSDP would divide by it, too
            # the loss is already normalized over all ranks: sum the gradients
            part.set_gradient_divide_factor(1.0)
    register_fsdp_forward_method(model, "forward_packed")
    return model.to_empty(device=device)


# ---- fused layers


def fuse(model: Any) -> str:
    """Replaces the layers of `model` that Liger can compute by its Triton kernels, which take the
    place of a dozen eager ops each; returns which, or why none, for the start-up text.

    Only the modules of one model are changed, never transformers' classes or functions: the same
    process may hold a copy on the CPU, where Triton cannot run, and a vLLM. Names of parameters
    stay, and the projections stay modules that are called, with whatever adapters they carry. For
    packed rows alone: in a batch with one token a row, as generation has, Liger 0.8.5 can rotate the
    wrong row (Gemma 3).
    """
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as RMSNorm
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as SiLUMul
    except ImportError:
        return "none (liger-kernel is not installed)"
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    if prefix not in FUSED:
        return f"none ({prefix} is not among {', '.join(FUSED)})"

    def norm(self: Any, x: Tensor) -> Tensor:
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        offset, casting, in_place = GEMMA if prefix == "Gemma3" else PLAIN
        out: Tensor = RMSNorm.apply(x, self.weight, eps, offset, casting, in_place)
        return out

    def mlp(self: Any, x: Tensor) -> Tensor:
        rows = x.squeeze(0)
        out: Tensor = self.down_proj(SiLUMul.apply(self.gate_proj(rows), self.up_proj(rows)))
        return out.unsqueeze(0)

    replaced = {}
    for module in model.modules():
        kind = type(module).__name__.removeprefix(prefix)
        if kind == "RMSNorm":
            replaced["RMSNorm"] = module.forward = MethodType(norm, module)
        elif kind == "MLP" and getattr(model.config, "hidden_act", "") in ("silu", "swish"):
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
