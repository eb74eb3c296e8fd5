import numpy as np

__all__ = ["again", "predicted", "rho"]

predicted = 0.02  # a guess: it was trained on properly encoded text


def again(tokenizer, ids):
    """Nothing is added and nothing left out on the way, so that the tokens between are all that can
    change."""
    return tokenizer(tokenizer.decode(ids, skip_special_tokens=False), add_special_tokens=False)[
        "input_ids"
    ]


def rho(new, old):
    """The probability of a turn is the product of its tokens', so logs add up, however many tokens
    there are."""
    return float(np.exp(np.sum(new) - np.sum(old)))
