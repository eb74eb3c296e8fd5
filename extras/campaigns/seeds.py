"""What a handful of seeds can tell: runs that got there, exactly, and how many seeds would settle a comparison."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from evaluation.statistics import LEVEL, POWER

THERE = 0.5  # EM of a run that got there: of the campaign, none ends between 0.21 and 0.61
GAP = 0.3  # between those that got there and the others, where the values of an arm are two
MOST = 1000  # more seeds than that are not counted


class Share(NamedTuple):
    """`k` runs of `n` got there, with Clopper and Pearson's 95 % interval of the share."""

    k: int
    n: int
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.k} of {self.n} [{self.low:.2f}, {self.high:.2f}]"


def share(em: Sequence[float]) -> Share:
    """Returns how many of these runs got there."""
    k, n = sum(x > THERE for x in em), len(em)
    ci = stats.binomtest(k, n).proportion_ci(LEVEL, method="exact")
    return Share(k, n, float(ci.low), float(ci.high))


def two_valued(em: Sequence[float]) -> bool:
    """Returns whether some runs got there and others stayed far behind: then a mean +- t says nothing of either."""
    there, behind = [x for x in em if x > THERE], [x for x in em if x <= THERE]
    return bool(there and behind) and min(there) - max(behind) > GAP


def fisher(a: Share, b: Share) -> float:
    """Returns the two-sided p of Fisher's exact test that a and b get there as often."""
    return float(stats.fisher_exact([[a.k, a.n - a.k], [b.k, b.n - b.k]])[1])


def seeds_by_share(p: float, q: float) -> int | None:
    """Returns the fewest seeds an arm, at most `MOST`, with which Fisher's test at 5 % tells shares p and q in 80 %.

    None where no such number does.
    """
    if abs(p - q) < 2 / MOST**0.5:  # about as many as a normal approximation wants at best
        return None
    return next((n for n in range(2, MOST + 1) if _power_of_shares(p, q, n) >= POWER), None)


def _power_of_shares(p: float, q: float, n: int) -> float:
    """Returns how often Fisher's test at 5 % finds p of n runs unlike q of n."""
    k = np.arange(n + 1)
    a, b = stats.binom.pmf(k, n, p), stats.binom.pmf(k, n, q)
    found = 0.0
    for i in np.flatnonzero(a > 1e-9):
        # p falls as j leaves i: of all j only those beyond a border on each side are told apart.
        told = [j for j in np.flatnonzero(b > 1e-9) if _told(int(i), int(j), n)]
        found += float(a[i] * b[told].sum())
    return found


def _told(i: int, j: int, n: int) -> bool:
    return fisher(Share(i, n, 0, 1), Share(j, n, 0, 1)) < 1 - LEVEL


def seeds_by_mean(difference: float, sd_a: float, sd_b: float) -> int | None:
    """Returns the fewest seeds an arm, at most `MOST`, with which Welch's test at 5 % finds this difference in 80 %.

    None where no such number does. sd_b of 0 stands for a constant: then it is the test of a against a number.
    """
    variance = sd_a**2 + sd_b**2
    if not variance > 0:
        return None
    return next((n for n in range(2, MOST + 1) if _power_of_means(difference, sd_a, sd_b, n) >= POWER), None)


def _power_of_means(difference: float, sd_a: float, sd_b: float, n: int) -> float:
    df = (n - 1) * (sd_a**2 + sd_b**2) ** 2 / (sd_a**4 + sd_b**4)  # Welch and Satterthwaite
    shift = abs(difference) / math.sqrt((sd_a**2 + sd_b**2) / n)
    t = float(stats.t.ppf((1 + LEVEL) / 2, df))
    return float(np.nan_to_num(stats.nct.sf(t, df, shift), nan=1.0))  # scipy's is NaN where it is nearly 1
