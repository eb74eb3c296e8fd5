"""A trajectory's tokens as the page of a run shows them: their texts, and what engine and update saw of each."""

import math
from itertools import groupby
from typing import Any

from tokenizers.decoders import DecodeStream

from tasks import Trajectory


def token_data(tau: Trajectory, tokenizer: Any, limit: int = 2000) -> dict[str, Any]:
    """Returns the columns of a watched trajectory's first `limit` action tokens, and how many there are in all.

    turns: action tokens of each turn; text: of each token, where several make a character that of the last one; engine:
    its log-prob as sampled; the others as in `grpo.note_tokens`, to four digits.
    """
    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer.backend_tokenizer, id) or "" for id in tau.ids]
    places = [k for k, m in enumerate(tau.mask) if m]
    columns = {"engine": [tau.logps[k] for k in places], **tau.tokens}
    return {
        "n": len(places),
        "turns": [len(list(turn)) for acted, turn in groupby(tau.mask) if acted],
        "text": [texts[k] for k in places[:limit]],
        **{name: [short(x) for x in values[:limit]] for name, values in columns.items()},
    }


def short(x: float) -> float | None:
    """Returns x with four significant digits; None for nan and infinities, unknown to JSON."""
    return round(float(f"{x:.4g}"), 6) if math.isfinite(x) else None
