"""What the policy is trained towards: the advantage of each trajectory (§2.2, Eq. 3)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollout import Trajectory


def set_advantages(taus: Sequence[Trajectory]) -> None:
    """Sets `tau.advantage` of every trajectory, comparing those of one group."""
    groups: dict[int, list[Trajectory]] = {}
    for tau in taus:
        groups.setdefault(tau.group, []).append(tau)
    for group in groups.values():
        A = group_advantages(np.array([tau.reward for tau in group]))
        for tau, a in zip(group, A, strict=True):
            tau.advantage = float(a)


def group_advantages(r: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns A-hat (G,) of a group's rewards (G,): their distance to the mean in units of the standard deviation."""
    A: npt.NDArray[np.float64] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)  # Eq.3 CHOICE-19
    return A
