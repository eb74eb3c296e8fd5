__all__ = ["flags", "predicted", "unmasked"]

# guesses
predicted = {
    "frozen policy": 0.6,
    "frozen instruction": 0.6,
    "shuffled rewards": 0.0,
    "no mask": 0.5,
}


def flags():
    """A learning rate of 0 keeps the weights; the static mode is Search-R1, whose instruction never
    changes."""
    return {"frozen policy": ["--lr", "0"], "frozen instruction": ["--mode", "static"]}


def unmasked(mask, prompt_tokens):
    """After the prompt everything counts as if the policy had written it."""
    return [0] * prompt_tokens + [1] * (len(mask) - prompt_tokens)
