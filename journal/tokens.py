"""A trajectory's tokens as the page of a run shows them: their texts, and what engine and update saw of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tasks import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # a token that holds a part of a character decodes to this


def piece_reader(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Returns a function from a token's id to its text inside a longer text, with the space that it may begin with."""
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"][:1]  # some tokenizers drop a text's first space
    start = len(tokenizer.decode(anchor, skip_special_tokens=False))

    @cache
    def piece(id: int) -> str:
        text: str = tokenizer.decode([*anchor, id], skip_special_tokens=False)
        return text[start:]

    return piece


def pieces(tokenizer: Tokenizer, piece: Callable[[int], str], ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; of tokens that share a character the first has it, and the others have "".

    A part of a character whose rest does not follow stands alone.
    """
    out = [piece(id) for id in ids]
    k = 0
    while k < len(out):
        end = k + 1
        for n in (2, 3, 4) if BROKEN in out[k] else ():
            text = tokenizer.decode(ids[k : k + n], skip_special_tokens=False)
            if BROKEN not in text and k + n <= len(out):
                end = k + n
                out[k:end] = [text, *[""] * (n - 1)]
                break
        k = end
    return out


def token_data(tau: Trajectory, tokenizer: Tokenizer, piece: Callable[[int], str], limit: int = 2000) -> dict[str, Any]:
    """Returns the columns of a watched trajectory's first `limit` action tokens, and how many there are in all.

    turns: action tokens of each turn; text: of each token; engine: its log-prob as sampled; the others as in
    `grpo.note_tokens`, to four digits.
    """
    places = [k for k, m in enumerate(tau.mask) if m]
    columns: dict[str, Sequence[float]] = {"engine": [tau.logps[k] for k in places], **tau.tokens}
    return {
        "n": len(places),
        "turns": [len(list(turn)) for acted, turn in groupby(tau.mask) if acted],
        "text": pieces(tokenizer, piece, [tau.ids[k] for k in places[:limit]]),
        **{name: [short(x) for x in values[:limit]] for name, values in columns.items()},
    }


def short(x: float) -> float | int | None:
    """Returns x with four significant digits, whole numbers as int; None for nan and infinities, unknown to JSON."""
    if not math.isfinite(x):
        return None
    rounded = round(float(f"{x:.4g}"), 6)
    return int(rounded) if rounded == int(rounded) else rounded
