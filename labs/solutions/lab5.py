import numpy as np
from scipy.stats import binom

__all__ = ["drop_probability", "predicted", "survivors"]

predicted = 0.1  # a guess


def survivors(N, N_parent):
    """N // 2 go, which rounds down."""
    return max(N_parent, N - N // 2)


def drop_probability(n, best, other, N, keep):
    """P(Y >= x) = P(Y > x - 1), and P(at least keep ahead) = P(more than keep - 1 ahead)."""
    x = np.arange(n + 1)
    ahead = binom.sf(x - 1, n, other)
    return float(np.sum(binom.pmf(x, n, best) * binom.sf(keep - 1, N - 1, ahead)))
