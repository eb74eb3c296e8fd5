"""FlashAttention in bfloat16 on a card, over sequences of any lengths in one row: 4 where it is
installed and the card has it, else torch's own, 2."""

import functools
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


@functools.cache
def find_flash_attention_4() -> Any:
    """Returns its function for ragged rows; None where it is not installed, or the card is neither
    Hopper nor Blackwell."""
    if torch.cuda.get_device_capability()[0] in (9, 10):
        with suppress(ImportError):
            version("flash-attn-4")  # the package flash-attn has an old part of it, too
            from flash_attn.cute import flash_attn_varlen_func

            return flash_attn_varlen_func
    return None


def attend_ragged(
    q: Tensor, k: Tensor, v: Tensor, packing: Any, window: int, scaling: float | None
) -> Tensor:
    """Attention (T, heads, dim) of a models.packing.Packing, whose causal mask ends at a piece's last
    query and last key; a token sees at most `window`."""
    max_q, max_k = packing.longest
    # without a window the kernels have a faster variant
    whole = window >= max_k
    flash_attention_4 = find_flash_attention_4()
    if flash_attention_4:
        return flash_attention_4(  # type: ignore[no-any-return]
            q,
            k,
            v,
            cu_seqlens_q=packing.query_ends,
            cu_seqlens_k=packing.key_ends,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            softmax_scale=scaling,
            window_size=(None if whole else window - 1, 0),
        )[0]
    return varlen_attn(
        q,
        k,
        v,
        packing.query_ends,
        packing.key_ends,
        max_q,
        max_k,
        scale=scaling,
        window_size=(-1 if whole else window - 1, 0),
        enable_gqa=True,
    )
