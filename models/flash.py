"""flash-attn in place of torch's own FlashAttention-2, where a package for this GPU is installed and agrees with it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import attention

from models.packing import Packing, packed_attention

# By the GPU's major capability, torch's names for flash_attn_interface and flash_attn.cute; the faster one first.
NAMES = {9: ("FA3", "FA4"), 10: ("FA4",)}
OWN = "FlashAttention-2 (torch)"
CASE = Packing([40, 200, 130, 64], [-1, 0, 0, -1])  # two tails of one prompt, and one alone
CLOSE = 0.02  # largest difference as a share of the largest value: bfloat16 rounds to 0.004


def choose(config: Any, device: str = "cuda") -> str:
    """Chooses what computes packed attention in this process, on its GPU; returns its name, and why not another.

    torch's switch is a prototype, and a package may lack what a model needs: so both compute a small case with this
    model's heads first, forward and backward.
    """
    refused = []
    for name in NAMES.get(torch.cuda.get_device_capability()[0], ()):
        want = small_case(config, device)
        try:
            attention.activate_flash_attention_impl(name)
            pairs = zip(small_case(config, device), want, strict=True)
            off = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()
        except ImportError:
            continue
        except Exception as e:  # a shape or an option that it does not take
            refused.append(f"{name}: {(str(e).splitlines() or [type(e).__name__])[0]}")
        else:
            if off < CLOSE:  # not if it is a NaN
                return name
            refused.append(f"{name}: it is {off:.1%} off")
        if attention.current_flash_attention_impl():
            attention.restore_flash_attention_impl()
    return OWN + "".join(f", not {why}" for why in refused)


def small_case(config: Any, device: str) -> list[torch.Tensor]:
    """Returns output and gradients of a packed attention with the model's heads, in float32."""
    text = config.get_text_config()
    heads, kv = text.num_attention_heads, text.num_key_value_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    g = torch.Generator().manual_seed(0)
    T, window = sum(CASE.lengths), getattr(text, "sliding_window", None) and 50
    x = [torch.randn(1, h, T, dim, generator=g).to(device, torch.bfloat16).requires_grad_() for h in (heads, kv, kv)]
    packing = Packing(CASE.lengths, CASE.parents, x[0].device)
    out, _ = packed_attention(None, x[0], x[1], x[2], None, packing=packing, sliding_window=window)
    out.float().square().sum().backward()
    return [out.detach().float(), *(t.grad.float() for t in x if t.grad is not None)]
