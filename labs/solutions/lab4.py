import numpy as np

__all__ = ["again", "first_difference", "predicted", "rho"]

predicted = 0.02  # a guess: it was trained on properly encoded text


def again(tokenizer, ids):
    """Nothing is added and nothing left out on the way, so that the tokens between are all that can
    change."""
    return tokenizer(tokenizer.decode(ids, skip_special_tokens=False), add_special_tokens=False)[
        "input_ids"
    ]


def first_difference(a, b):
    """Where one list is the beginning of the other, they differ where the shorter one ends."""
    if a == b:
        return -1
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def rho(new, old):
    """The probability of a turn is the product of its tokens', so logs add up, however many tokens
    there are."""
    return float(np.exp(np.sum(new) - np.sum(old)))
