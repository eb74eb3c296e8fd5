"""A trajectory's tokens as the page of a run shows them: their texts, and what engine and update
saw of each."""

import math
from itertools import groupby, pairwise
from typing import Any

from tokenizers.decoders import DecodeStream

from plumbing.files import Row
from tasks import Trajectory


def token_data(tau: Trajectory, tokenizer: Any, limit: int = 2000) -> Row:
    """Returns the columns of a watched trajectory's first `limit` action tokens, and how many there
    are in all.

    prompt: as the policy read it; turns: action tokens of each turn; text: of each token (a
    character that several make is with the last one, and U+FFFD if the turn ends within it);
    engine: its log-prob as sampled; the others as in `grpo.note_tokens`, to four digits.
    """
    stream = DecodeStream(skip_special_tokens=False)
    texts = [
        stream.step(tokenizer.backend_tokenizer, id) or "\ufffd" * (acted > after)
        for id, (acted, after) in zip(tau.ids, pairwise([*tau.mask, 0]), strict=True)
    ]
    places = [k for k, m in enumerate(tau.mask) if m]
    columns = {"engine": [tau.logps[k] for k in places], **tau.tokens}
    return {
        "n": len(places),
        "prompt": tokenizer.decode(tau.ids[: tau.prompt_tokens], skip_special_tokens=False),
        "turns": [len(list(turn)) for acted, turn in groupby(tau.mask) if acted],
        "text": [texts[k] for k in places[:limit]],
        **{name: [short(x) for x in values[:limit]] for name, values in columns.items()},
    }


def short(x: float) -> float | None:
    """Returns x with four significant digits; None for nan and infinities, unknown to JSON."""
    return round(float(f"{x:.4g}"), 6) if math.isfinite(x) else None
