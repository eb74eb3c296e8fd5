"""A trajectory's tokens as the page of a run shows them: their texts, and what engine and update
saw of each."""

import math
from itertools import groupby
from typing import Any

from tokenizers.decoders import DecodeStream

from plumbing.files import Row
from plumbing.words import cut_middle
from tasks import Trajectory


def token_data(tau: Trajectory, tokenizer: Any, limit: int = 2000) -> Row:
    """Returns the columns of a watched trajectory's first `limit` action tokens, and how many there
    are in all.

    prompt: as the policy read it; turns: action tokens of each turn; text: of each token (a
    character that several make is with the last one, and U+FFFD if the turn ends within it);
    engine: its log-prob as sampled; the others as in `grpo.note_tokens`, to four digits.
    """
    stream = DecodeStream(skip_special_tokens=False)
    texts = list[str]()
    for id, acts, goes_on in zip(tau.ids, tau.mask, [*tau.mask[1:], 0], strict=True):
        text = stream.step(tokenizer.backend_tokenizer, id)
        if not text and acts and not goes_on:
            text = "\ufffd"
        texts.append(text or "")
    places = [k for k, m in enumerate(tau.mask) if m]
    columns = {"engine": [tau.logps[k] for k in places], **tau.tokens}
    return {
        "n": len(places),
        "prompt": tokenizer.decode(tau.ids[: tau.prompt_tokens], skip_special_tokens=False),
        "turns": [len(list(turn)) for acted, turn in groupby(tau.mask) if acted],
        "text": [texts[k] for k in places[:limit]],
        **{name: [short(x) for x in values[:limit]] for name, values in columns.items()},
    }


def show_mask(tau: Trajectory, tokenizer: Any, width: int = 110) -> str:
    """Returns a trajectory as the update reads it, a line for each turn and each text between them.

    The middle of a long line is left out: whether a mask is wrong is seen at the ends.
    """
    shown = []
    for sampled, run in groupby(zip(tau.mask, tau.ids, strict=True), key=lambda pair: pair[0]):
        text: str = tokenizer.decode([id for _, id in run], skip_special_tokens=False)
        shown.append(f"  {'|' if sampled else ' '} {cut_middle(text, width)}".replace("\n", "\\n"))
    return "\n".join(shown[:20])


def short(x: float) -> float | None:
    """Returns x with four significant digits; None for nan and infinities, unknown to JSON."""
    return round(float(f"{x:.4g}"), 6) if math.isfinite(x) else None
