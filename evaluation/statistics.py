"""Intervals, paired tests, and what a table could have shown at all; scipy does the mathematics.

Questions and seeds are two levels and are never pooled into one number: an interval over questions holds for these
trained policies on other questions, an interval over seeds for other training runs on these questions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Values = Sequence[float] | npt.NDArray[np.float64]
K = TypeVar("K")
G = TypeVar("G")
LEVEL, POWER = 0.95, 0.8
Z = float(stats.norm.ppf((1 + LEVEL) / 2))  # 1.96
ROUNDING = 1e-12  # relative: 57/300 three times has a standard deviation of 1e-17


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

    A single value that is neither has no interval: it is infinite. The standard error of zeros and ones is Wilson's
    too, half the interval's width over 1.96: that no question was right is no proof of an accuracy of 0.
    """
    a = np.asarray(x, dtype=np.float64)
    if not right_or_wrong(a):
        return over_seeds(a)
    ci = stats.binomtest(int(a.sum()), len(a)).proportion_ci(LEVEL, method="wilson")
    return Interval(float(a.mean()), float(ci.low), float(ci.high), float(ci.high - ci.low) / 2 / Z, len(a))


def over_seeds(x: Values) -> Interval:
    """Returns the mean over training runs (n,) by Student's t with n - 1 degrees of freedom; infinite for one run."""
    a = np.asarray(x, dtype=np.float64)
    mean, se, n = float(a.mean()), _se(a), len(a)
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * se if n > 1 else math.inf
    return Interval(mean, mean - half, mean + half, se, n)


def paired(a: Values, b: Values) -> Difference:
    """Returns a - b (n,) on the same questions.

    Of right and wrong: Bonett and Price's interval (2012) and McNemar's exact test. Of other values: Student's t on the
    differences (Miller, arXiv 2411.00640); where they are all one difference, the sign test, and no interval.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    d, n = _minus(x, y), len(x)
    mean = float(d.mean())
    if right_or_wrong(x, y):
        only_a, only_b, p = mcnemar(x, y)
        more, less = (only_a + 1) / (n + 2), (only_b + 1) / (n + 2)
        se = math.sqrt((more + less - (more - less) ** 2) / (n + 2))
        low, high = max(-1.0, more - less - Z * se), min(1.0, more - less + Z * se)
        return Difference(Interval(mean, low, high, se, n), p, visible(se, math.inf))
    if (se := _se(d, float(np.abs([x, y]).max()))) > 0:  # NaN for a single question
        return Difference(over_seeds(d), float(stats.ttest_1samp(d, 0).pvalue), visible(se, n - 1))
    p = min(1.0, 2 * 0.5**n) if mean else 1.0
    return Difference(Interval(mean, -math.inf, math.inf, math.nan, n), p, math.inf)


def between_seeds(a: Values, b: Values) -> Difference:
    """Returns mean(a) - mean(b) of independent training runs, (n,) and (m,), by Welch's t test.

    Seeds that all end alike say nothing of how seeds differ: then there is no test, as for a single run.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    mean, n = float(_minus(x.mean(), y.mean())), len(x) + len(y)
    se = math.hypot(_se(x), _se(y))
    if not se > 0:  # NaN for a single run
        return Difference(Interval(mean, -math.inf, math.inf, math.nan, n), math.nan, math.inf)
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
    """Returns the unweighted mean over benchmarks; their errors are independent, so their squares add.

    Those below and those above the mean are added apart (Zou and Donner, 2008): Wilson's interval is lopsided.
    """
    k = len(parts)
    mean = sum(part.mean for part in parts.values()) / k
    low = mean - math.hypot(*(part.mean - part.low for part in parts.values())) / k
    high = mean + math.hypot(*(part.high - part.mean for part in parts.values())) / k
    se = math.hypot(*(part.se for part in parts.values())) / k
    return Interval(mean, low, high, se, sum(part.n for part in parts.values()))


def macro_difference(parts: Mapping[str, Difference]) -> Difference:
    """Returns the macro average of differences, by the normal distribution."""
    found = macro({name: part.interval for name, part in parts.items()})
    p = 2 * float(stats.norm.sf(abs(found.mean) / found.se))
    return Difference(found, p, visible(found.se, math.inf))


def holm(p: Sequence[float]) -> list[float]:
    """Returns Holm's adjusted p-values, in the order given: their family errs in at most 5 % of the cases at 0.05.

    NaN, where there was no test, stays NaN and is none of the family.
    """
    order = sorted((k for k in range(len(p)) if not math.isnan(p[k])), key=lambda k: p[k])
    adjusted, worst = [math.nan] * len(p), 0.0
    for rank, k in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - rank) * p[k]))
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
    found = zip(differences, holm([difference.p for difference in differences.values()]), strict=True)
    return {key: p for key, p in found if not math.isnan(p)}


def visible(se: float, df: float) -> float:
    """Returns the true difference that a two-sided t test with this standard error finds at 5 % in 80 % of the cases.

    `df` inf is the normal distribution: (1.960 + 0.842) se. Infinite where there is no standard error.
    """
    if not se > 0:
        return math.inf
    if math.isinf(df):
        return (Z + float(stats.norm.ppf(POWER))) * se
    t = float(stats.t.ppf((1 + LEVEL) / 2, df))

    def power(shift: float) -> float:
        other_side = float(np.nan_to_num(stats.nct.cdf(-t, df, shift)))  # scipy's is NaN where it is nearly 0
        return float(stats.nct.sf(t, df, shift)) + other_side

    high = 1.0
    while power(high) < POWER:
        high *= 2
    return float(optimize.brentq(lambda shift: power(shift) - POWER, high / 2, high)) * se


def right_or_wrong(*x: npt.NDArray[np.float64]) -> bool:
    """Returns whether all values are zeros and ones."""
    return {*np.concatenate(x).tolist()} <= {0.0, 1.0}


def _se(x: npt.NDArray[np.float64], size: float = 0.0) -> float:
    """Returns the standard error of the mean of x (n,): NaN for n = 1, 0 for values that are alike but for rounding.

    `size`: of the largest number that x was computed from.
    """
    if len(x) == 1:
        return math.nan
    sd = float(x.std(ddof=1))
    return sd / math.sqrt(len(x)) if sd > ROUNDING * max(size, float(np.abs(x).max())) else 0.0


def _minus(x: Any, y: Any) -> Any:
    """Returns x - y, 0 where they differ by rounding alone."""
    return np.where(np.isclose(x, y, rtol=ROUNDING, atol=0), 0.0, x - y)
