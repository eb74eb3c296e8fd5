import numpy as np

__all__ = ["average", "gradient", "k3", "predicted", "surrogate"]

predicted = -1.2  # the usual guess: that the clip holds on both sides


def surrogate(rho, A, eps):
    """Both products first, then the smaller: for A < 0 the smaller one has the larger ratio."""
    return np.minimum(rho * A, np.clip(rho, 1 - eps, 1 + eps) * A)


def k3(logp, ref_logp):
    """e^d has mean 1 over tokens of the policy, so e^d - 1 adds no bias and takes away most of the
    noise of -d."""
    d = ref_logp - logp
    return np.exp(d) - d - 1


def average(x, mask):
    """Tokens of a trajectory first, by its own number of sampled ones; then the trajectories of the
    group."""
    return ((x * mask).sum(1) / mask.sum(1)).mean()


def gradient(z, y, old_logp, A, eps):
    """The chain: d(-S)/dz = -(rho A) (1[j = y] - p), or 0 where min takes the clipped product."""
    p = np.exp(z - z.max())
    p /= p.sum()
    rho = np.exp(np.log(p[y]) - old_logp)
    clipped = np.clip(rho, 1 - eps, 1 + eps) * A < rho * A
    return (0.0 if clipped else rho * A) * (p - np.eye(len(z))[y])
