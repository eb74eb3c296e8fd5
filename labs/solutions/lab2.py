import numpy as np

__all__ = ["advantages", "of_a_success", "predicted", "useful"]

predicted = 0.5  # a guess


def advantages(r):
    """With 1e-6 below, a group of equals is 0 / 1e-6 = 0 instead of 0 / 0."""
    return (r - np.mean(r)) / (np.std(r, ddof=1) + 1e-6)


def useful(p, G):
    """A group is of no use if all G are right, p^G, or all wrong, (1 - p)^G; the two exclude each
    other."""
    return 1 - p**G - (1 - p) ** G


def of_a_success(k, G):
    """The mean is k / G; the squares add up to k (1 - k/G)^2 + (G - k) (k/G)^2 = k (G - k) / G,
    over G - 1. So A = (1 - k / G) / sqrt(k (G - k) / (G (G - 1))), which is the same as this."""
    return np.sqrt((G - k) * (G - 1) / (G * k))
