"""Sequences packed into one row, without padding, and the attention in such a row; a beginning that
several sequences share is in the row once.

The row is cut into pieces. A piece begins a sequence, or goes on from an earlier piece, its parent:
then its tokens follow the parent's in position and attend to them. So the trajectories of a group
are pieces with one parent, their prompt, and linear layers compute each token once.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# The tokens of a packed row are a multiple of this. oneDNN compiles a kernel, of 0.6 MB, for each
# shape that it meets, so there should be few.
ROW_MULTIPLE = 64


def amd_has(feature: str) -> bool:
    """Returns whether this machine's CPU is one of AMD's with a feature, by torch's name."""
    cpu = torch.cpu.get_capabilities()
    return str(cpu.get("cpu_name", "")).startswith("AMD") and cpu.get(feature, False)


@functools.cache
def prefer_onednn() -> bool:
    """Returns whether oneDNN multiplies float32 faster than MKL on this machine."""
    return amd_has("avx512_f")


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copies a tensor from the CPU to the device. The host does not wait: a GPU's stream keeps the
    order."""
    on_gpu = torch.device(device).type == "cuda"
    return (x.pin_memory() if on_gpu else x).to(device, non_blocking=on_gpu)


class Packing:
    """How a row of tokens is cut into pieces; made once for all layers.

    `lengths`: tokens of each piece; `parents`: the index of the piece that it continues, or -1. A
    parent continues none.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        parents: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ):
        self.lengths = list(lengths)
        self.parents = list(parents) or [-1] * len(self.lengths)
        # of each piece: the tokens of its parent, and what it sees, these and its own
        self.before = [0 if parent < 0 else self.lengths[parent] for parent in self.parents]
        seen = [before + n for before, n in zip(self.before, self.lengths, strict=True)]
        self.longest = max(self.lengths), max(seen)  # queries, keys
        # a piece's tokens stand behind its parent's, wherever they are in the row
        spans = [torch.arange(before, n) for before, n in zip(self.before, seen, strict=True)]
        self.positions = to_device(torch.cat(spans), device)  # (T,)
        # where each piece ends among the queries, and among the keys: cumulative, from 0
        ends = torch.tensor([[0, *self.lengths], [0, *seen]]).cumsum(1, dtype=torch.int32)
        self.query_ends, self.key_ends = to_device(ends, device)  # (pieces + 1,) each
        self.masks: dict[tuple, Tensor] = {}

    def with_parents(self, x: Tensor) -> list[Tensor]:
        """Returns for each piece what its tokens attend to, of keys or values (1, heads, T, dim) of
        the row: the parent's and its own."""
        own = x.split(self.lengths, 2)
        return [
            piece if parent < 0 else torch.cat([own[parent], piece], 2)
            for parent, piece in zip(self.parents, own, strict=True)
        ]

    @cached_property
    def key_indices(self) -> tuple[Tensor, ...]:
        """Returns what `KeysOfPieces` copies, and how its gradients come back.

        The pieces attend to K keys in all: those of a shared prompt count once for each piece.

        (K,): the token of each key; (T,): the first key of each token; (S,): the tokens that have
        several keys; (S, most): all keys of these, filled up with K.
        """
        # the keys of each piece: its parent's tokens and its own
        pieces = np.split(np.arange(sum(self.lengths)), np.cumsum(self.lengths)[:-1])
        tokens = []
        for parent, own in zip(self.parents, pieces, strict=True):
            if parent >= 0:
                tokens.append(pieces[parent])
            tokens.append(own)
        token_of = np.concatenate(tokens)

        # the keys in the order of their tokens, each the nth of its token's
        K, order = len(token_of), token_of.argsort(kind="stable")
        token = token_of[order]
        # `searchsorted` is where each token's keys begin
        nth = np.arange(K) - np.searchsorted(token, token)
        keys_of = np.full((token[-1] + 1, nth.max() + 1), K)
        keys_of[token, nth] = order
        shared = np.flatnonzero(keys_of[:, 1] < K)  # tokens that have a second key
        indices = token_of, keys_of[:, 0], shared, keys_of[shared]
        return tuple(to_device(torch.from_numpy(x), self.positions.device) for x in indices)

    def mask(self, before: int, n: int, window: int, like: Tensor) -> Tensor:
        """Returns what is added to a piece's scores, (n - before, n) in the dtype of `like`: 0
        where a token may attend."""
        key = before, n, window
        if key not in self.masks:
            place = torch.arange(n, device=like.device)
            distance = place[before:, None] - place
            hidden = (distance < 0) | (distance >= window)
            self.masks[key] = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self.masks[key]


class KeysOfPieces(torch.autograd.Function):
    """Keys and values (T, heads, dim) of a row -> what its pieces attend to, (K, heads, dim) each,
    by Packing.key_indices.

    One copy of both, where a copy for each piece would keep a small row waiting for Python. The
    gradients of a shared token are summed in float32, as torch sums bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, token_of: Tensor, *back: Tensor) -> Any:
        ctx.back, ctx.heads = back, [k.shape[1], v.shape[1]]
        return torch.cat([k, v], 1)[token_of].split(ctx.heads, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        first, shared, several = ctx.back
        both = F.pad(torch.cat(grads, 1), (0, 0, 0, 0, 0, 1))  # a row of zeros at K, the filling
        # a token with one key takes that key's gradient; one with several, the sum of theirs
        sums = both[first].index_copy_(0, shared, both[several].sum(1))
        return *sums.split(ctx.heads, 1), None, None, None, None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """SDPA of (B, heads, T, dim) with a mask (..., T, columns), whose keys may have fewer heads.

    Heads that share keys become more queries of one head: no fast kernel takes both a mask and GQA,
    and a copy of the keys for each head costs more than the product.
    """
    B, heads, T, dim = query.shape
    repeats = heads // key.shape[1]
    if repeats > 1:
        query = query.reshape(B, -1, repeats * T, dim)
        mask = torch.cat([mask] * repeats, -2)
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return out.reshape(B, heads, T, -1)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention within each of the sequences that are packed into one row.

    query, key, value (1, heads, T, dim) -> (1, T, heads, dim). Without `packing`, as in generation,
    they are (B, heads, T, dim); a causal mask (B, 1, T, columns), with columns in the order of
    positions, is narrowed to the layer's sliding window.
    """
    window = kwargs.get("sliding_window")
    if packing is None:
        if attention_mask is None:
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            return sdpa_attention_forward(
                module, query, key, value, None, scaling=scaling, **kwargs
            )
        if window:
            ordinal = attention_mask.cumsum(-1)
            attention_mask = attention_mask & (ordinal > ordinal[..., -1:] - window)
        out = grouped_attention(query, key, value, attention_mask, scaling)
        return out.transpose(1, 2).contiguous(), None  # some models call `view` on it
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, packing, window, scaling).unsqueeze(0), None


def attend(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, window: int | None, scaling: float | None
) -> Tensor:
    """Causal attention of a packed row, q, k, v (T, heads, dim) -> (T, heads, dim), in which a token
    sees at most `window` tokens."""
    window = window or packing.longest[1]  # all that there is
    if q.dtype == torch.bfloat16 and q.is_cuda:
        from kernels.flash import attend_ragged

        if any(packing.before):
            k, v = KeysOfPieces.apply(k, v, *packing.key_indices)
        return attend_ragged(q, k, v, packing, window, scaling)

    # In any other dtype or on any other device: piece by piece.
    # The float32 kernel that keeps no matrix (T, T) needs as many heads of keys as of queries
    if q.is_cuda:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    gqa = q.shape[1] > k.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, T, dim)
    of_pieces = zip(
        packing.before,
        q.split(packing.lengths, 2),
        packing.with_parents(k),
        packing.with_parents(v),
        strict=True,
    )
    parts = []
    for before, queries, keys, values in of_pieces:
        n = keys.shape[2]
        # plain causal attention, unless the piece has a parent or a window narrower than it
        if before or window < n:
            mask = packing.mask(before, n, window, queries)
            part = grouped_attention(queries, keys, values, mask, scaling)
        else:
            part = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scaling, enable_gqa=gqa
            )
        parts.append(part)
    return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1).contiguous()


def prefix_of(tau: Any) -> tuple[int, ...]:
    """Returns the tokens that a trajectory shares with others of the same prompt: all of it but the
    last one, which predicts the first sampled token."""
    return tuple(tau.ids[: max(0, tau.prompt_tokens - 1)])


def micro_batches(taus: Sequence[Any], micro_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Returns the indices of the trajectories, cut in their order into batches of at most
    `micro_tokens` (a longer one is alone), the largest as small as possible. A prompt counts once
    in a batch.

    Their number is a multiple of `ranks`, since all ranks must work in step; some may then be
    empty. The largest come first, so that ranks compute similar sizes together.
    """
    prefixes = [prefix_of(tau) for tau in taus]

    def cut(most: int) -> tuple[list[list[int]], list[int]]:
        """Returns batches of at most `most` tokens, and how many each has."""
        batches, sizes = list[list[int]](), list[int]()
        begun = set[tuple]()  # prompts in the last batch
        for k, tau in enumerate(taus):
            prefix = prefixes[k]
            added = len(tau.ids)
            if prefix in begun:
                added -= len(prefix)

            # a batch with no room for it is full
            if not batches or sizes[-1] + added > most:
                batches.append([])
                sizes.append(0)
                begun.clear()
                added = len(tau.ids)
            batches[-1].append(k)
            sizes[-1] += added
            begun.add(prefix)
        return batches, sizes

    # n batches are needed anyway: bisect for the smallest limit that needs no more
    n = math.ceil(len(cut(micro_tokens)[0]) / ranks) * ranks
    low, high = 1, micro_tokens
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)[0]) > n:
            low = middle + 1
        else:
            high = middle

    batches, sizes = cut(low)
    largest_first = sorted(range(len(batches)), key=sizes.__getitem__, reverse=True)
    return [batches[k] for k in largest_first] + [[]] * (n - len(batches))


def pack(batch: Sequence[Any], device: torch.device) -> tuple[Tensor, Packing, Tensor, Tensor]:
    """Returns ids (T,) of a row in which trajectories follow one another; a prompt that several
    share stands once, before the first of them; its packing; and for the N action tokens where
    the tokens that predict them stand (N,) and their ids (N,)."""
    sharing = Counter(map(prefix_of, batch))
    begun: dict[tuple, int] = {}  # the piece of each prompt that is in the row already
    ids: list[int] = []
    lengths: list[int] = []
    parents, predicting, targets = [], [], []
    for tau in batch:
        # a prompt that no other trajectory has is part of its own piece
        prefix = prefix_of(tau)
        if sharing[prefix] == 1:
            prefix = ()
        shared = len(prefix)
        if prefix and prefix not in begun:
            begun[prefix] = len(lengths)
            lengths.append(shared)
            parents.append(-1)
            ids += prefix

        # What the trajectory adds is the next piece. Its token k >= shared is at offset + k in the row.
        offset = len(ids) - shared
        lengths.append(len(tau.ids) - shared)
        parents.append(begun.get(prefix, -1))
        ids += tau.ids[shared:]

        # an action token is predicted by the one before it, which `prefix_of` never takes
        for k, sampled in enumerate(tau.mask):
            if sampled:
                predicting.append(offset + k - 1)
                targets.append(tau.ids[k])

    # a sequence that nobody reads fills the row up
    filler = -len(ids) % ROW_MULTIPLE if device.type == "cpu" and prefer_onednn() else 0
    if filler:
        ids += [0] * filler
        lengths.append(filler)
        parents.append(-1)

    # a batch without trajectories, which other ranks may have, is one token without an action
    packing = Packing(lengths or [1], parents, device)
    row = to_device(torch.tensor(ids or [0]), device)
    both = to_device(torch.tensor([predicting, targets]).long(), device)
    return row, packing, *both
