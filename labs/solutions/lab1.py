import numpy as np

__all__ = ["predicted", "probabilities", "weight"]

predicted = 0.4  # a guess, in proportion to the weights


def weight(rewards, n):
    """A slice of the last n is shorter if there are fewer; its own length divides, so a new
    instruction is not punished. An empty one would divide by 0."""
    window = rewards[-n:]
    return sum(window) / len(window) if window else 0.0


def probabilities(w, tau_s):
    """The largest exponent becomes 0, so nothing overflows; the factor e^-max cancels in the
    quotient."""
    z = np.asarray(w) / tau_s
    e = np.exp(z - z.max())
    return e / e.sum()
