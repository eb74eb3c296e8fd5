"""Intervals, paired tests, and what a table could have shown at all; scipy does the mathematics.

Questions and seeds are two levels and are never pooled into one number: an interval over questions holds for these
trained policies on other questions, an interval over seeds for other training runs on these questions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Values = Sequence[float] | npt.NDArray[np.float64]
K = TypeVar("K")
G = TypeVar("G")
LEVEL, POWER = 0.95, 0.8


class Interval(NamedTuple):
    """A mean with its 95 % interval, its standard error and how many values it is of."""

    mean: float
    low: float
    high: float
    se: float
    n: int

    def __format__(self, style: str) -> str:
        """As "0.512 [0.490, 0.534]", or with another `style` of its numbers: "+" is for differences, ",.0f" for counts.

        The mean alone where the interval is infinite, or where all values are alike and say nothing of how they differ.
        """
        style = style if style.endswith("f") else style + ".3f"
        told = math.isfinite(self.low) and self.low < self.high
        return f"{self.mean:{style}} [{self.low:{style}}, {self.high:{style}}]" if told else f"{self.mean:{style}}"


class Difference(NamedTuple):
    """How much higher a is than b, with the p-value of no difference and the smallest one that would have shown."""

    interval: Interval
    p: float
    visible: float  # the difference that a test at 5 % finds in 80 % of the cases


def interval(x: Values) -> Interval:
    """Returns the mean of x (n,): Wilson's interval for zeros and ones, Student's t for anything else.

    A single value that is neither has no interval: it is infinite.
    """
    a = np.asarray(x, dtype=np.float64)
    mean, n, se = float(a.mean()), len(a), _se(a)
    if set(np.unique(a)) <= {0.0, 1.0}:
        ci = stats.binomtest(int(a.sum()), n).proportion_ci(LEVEL, method="wilson")
        return Interval(mean, float(ci.low), float(ci.high), se, n)
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * se if n > 1 else math.inf
    return Interval(mean, mean - half, mean + half, se, n)


def over_seeds(x: Values) -> Interval:
    """Returns the mean over training runs (n,) by Student's t with n - 1 degrees of freedom; infinite for one run."""
    a = np.asarray(x, dtype=np.float64)
    se, n = _se(a), len(a)
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * se if n > 1 else math.inf
    return Interval(float(a.mean()), float(a.mean()) - half, float(a.mean()) + half, se, n)


def paired(a: Values, b: Values) -> Difference:
    """Returns a - b (n,) on the same questions (Student's t on the differences; Miller, arXiv 2411.00640)."""
    d = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    found = over_seeds(d)  # the same t interval, of differences
    if len(d) == 1:
        return Difference(found, math.nan, math.inf)
    if found.se == 0:
        return Difference(found, float(found.mean == 0), 0.0)
    return Difference(found, float(stats.ttest_rel(a, b).pvalue), visible(found.se, len(d) - 1))


def between_seeds(a: Values, b: Values) -> Difference:
    """Returns mean(a) - mean(b) of independent training runs, (n,) and (m,), by Welch's t test.

    Seeds that all end alike say nothing of how seeds differ: then there is no test, as for a single run.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    mean, n = float(x.mean() - y.mean()), len(x) + len(y)
    se = math.hypot(_se(x), _se(y))
    if min(len(x), len(y)) < 2 or (se == 0 and mean):
        return Difference(Interval(mean, -math.inf, math.inf, math.nan, n), math.nan, math.inf)
    if se == 0:
        return Difference(Interval(mean, mean, mean, 0.0, n), 1.0, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # seeds that end alike on one side: Welch's test can take it
        test = stats.ttest_ind(x, y, equal_var=False)
    half = float(stats.t.ppf((1 + LEVEL) / 2, test.df)) * se
    return Difference(Interval(mean, mean - half, mean + half, se, n), float(test.pvalue), visible(se, float(test.df)))


def mcnemar(a: Values, b: Values) -> tuple[int, int, float]:
    """Returns (questions that only a has right, that only b has right, exact two-sided p), for single greedy runs."""
    x, y = np.asarray(a) > 0.5, np.asarray(b) > 0.5
    only_a, only_b = int((x & ~y).sum()), int((y & ~x).sum())
    if only_a + only_b == 0:
        return 0, 0, 1.0
    return only_a, only_b, float(stats.binomtest(only_a, only_a + only_b, 0.5).pvalue)


def macro(parts: Mapping[str, Interval]) -> Interval:
    """Returns the unweighted mean over benchmarks; their errors are independent, so their squares add."""
    k = len(parts)
    mean = sum(part.mean for part in parts.values()) / k
    se = math.sqrt(sum(part.se**2 for part in parts.values())) / k
    half = float(stats.norm.ppf((1 + LEVEL) / 2)) * se
    return Interval(mean, mean - half, mean + half, se, sum(part.n for part in parts.values()))


def macro_difference(parts: Mapping[str, Difference]) -> Difference:
    """Returns the macro average of differences, by the normal distribution."""
    found = macro({name: part.interval for name, part in parts.items()})
    p = 2 * float(stats.norm.sf(abs(found.mean) / found.se)) if found.se else float(found.mean == 0)
    return Difference(found, p, visible(found.se, math.inf))


def holm(p: Sequence[float]) -> list[float]:
    """Returns Holm's adjusted p-values, in the order given: their family errs in at most 5 % of the cases at 0.05."""
    order = sorted(range(len(p)), key=lambda k: p[k])
    adjusted, worst = [0.0] * len(p), 0.0
    for rank, k in enumerate(order):
        worst = max(worst, min(1.0, (len(p) - rank) * p[k]))
        adjusted[k] = worst
    return adjusted


def against(baseline: str, values: Mapping[tuple[G, str], Values]) -> dict[tuple[G, str], Difference]:
    """Returns how much higher the values of each (group, name) are than the baseline's in its group, if it is there."""
    return {
        (group, name): between_seeds(x, values[group, baseline])
        for (group, name), x in values.items()
        if name != baseline and (group, baseline) in values
    }


def adjusted(differences: Mapping[K, Difference]) -> dict[K, float]:
    """Returns Holm's adjusted p of those differences that have a p; the others are left out."""
    told = [key for key, difference in differences.items() if math.isfinite(difference.p)]
    return dict(zip(told, holm([differences[key].p for key in told]), strict=True))


def visible(se: float, df: float) -> float:
    """Returns the true difference that a two-sided t test with this standard error finds at 5 % in 80 % of the cases.

    `df` inf is the normal distribution: (1.960 + 0.842) se.
    """
    if not se:
        return 0.0
    if math.isinf(df):
        return float(stats.norm.ppf((1 + LEVEL) / 2) + stats.norm.ppf(POWER)) * se
    t = float(stats.t.ppf((1 + LEVEL) / 2, df))

    def power(shift: float) -> float:
        other_side = float(np.nan_to_num(stats.nct.cdf(-t, df, shift)))  # scipy's is NaN where it is nearly 0
        return float(stats.nct.sf(t, df, shift)) + other_side

    high = 1.0
    while power(high) < POWER:
        high *= 2
    return float(optimize.brentq(lambda shift: power(shift) - POWER, high / 2, high)) * se


def _se(x: npt.NDArray[np.float64]) -> float:
    """Returns the standard error of the mean of x (n,); NaN for n = 1."""
    return float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.nan
