"""Intervals, paired tests, and what a table could have shown at all; scipy does the mathematics.

Questions and seeds are two levels and are never pooled into one number: an interval over questions
holds for these trained policies on other questions, an interval over seeds for other training runs
on these questions.
"""

import warnings
from collections.abc import Mapping, Sequence
from math import hypot, inf, isfinite, isinf, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special, stats

Array = npt.NDArray[np.float64]
Values = Sequence[float] | Array
LEVEL, POWER = 0.95, 0.8
Z = stats.norm.ppf((1 + LEVEL) / 2)  # 1.96
DIGITS = 12  # values that differ by rounding count as equal: 57/300 and 0.19


class Interval(NamedTuple):
    """A mean with its 95 % interval, its standard error and how many values it is of."""

    mean: float
    low: float
    high: float
    se: float
    n: int

    def __format__(self, style: str) -> str:
        """As "0.512 [0.490, 0.534]", or with another `style` of its numbers: "+" is for
        differences, ",.0f" for counts.

        The mean alone where the interval is infinite, or where equal values say nothing of how they
        differ.
        """
        style = style if style.endswith("f") else style + ".3f"
        mean, low, high = (f"{x:{style}}" for x in self[:3])
        known = isfinite(self.low) and self.low < self.high
        return f"{mean} [{low}, {high}]" if known else mean

    def within(self, least: float, most: float) -> "Interval":
        """Cuts the interval at the bounds of a measure: its true mean lies in them, so that the
        coverage stays.

        Nothing is cut where it is infinite, or where the mean shows that those are not the bounds
        (percentages, say).
        """
        if isinf(self.low) or not least <= self.mean <= most:
            return self
        return self._replace(low=max(self.low, least), high=min(self.high, most))


class Difference(NamedTuple):
    """How much higher a is than b, with the p-value of no difference and the smallest one that
    would have shown."""

    interval: Interval
    p: float
    visible: float  # the difference that a test at 5 % finds in 80 % of the cases


def estimate_mean(x: Values) -> Interval:
    """Wilson's interval of the mean of zeros and ones (n,), Student's t for anything else.

    The standard error of zeros and ones is Wilson's too, half the interval's width over 1.96: that
    no question was right is no proof of an accuracy of 0.
    """
    a = _array(x)
    if not right_or_wrong(a):
        return estimate_over_seeds(a)
    low, high = stats.binomtest(int(a.sum()), len(a)).proportion_ci(LEVEL, method="wilson")
    return Interval(a.mean(), low, high, (high - low) / 2 / Z, len(a))


def estimate_over_seeds(x: Values) -> Interval:
    """Student's interval of the mean over training runs (n,), with n - 1 degrees of freedom;
    infinite for one run."""
    a = _array(x)
    return _interval(a.mean(), _se(a), len(a) - 1, len(a))


def compare_pairs(a: Values, b: Values) -> Difference:
    """Compares a with b (n,) on the same questions.

    Of right and wrong: Bonett and Price's interval (2012) and McNemar's exact test. Of other
    values: Student's t on the differences (Miller, arXiv 2411.00640); where they are all one
    difference, the sign test, and no interval.
    """
    x, y = _array(a), _array(b)
    d, n = _array(x - y), len(x)
    mean = d.mean()
    # right or wrong
    if right_or_wrong(x, y):
        only_a, only_b = int((x > y).sum()), int((y > x).sum())
        unlike = only_a + only_b
        p = stats.binomtest(only_a, unlike).pvalue if unlike else 1.0
        more, less = (only_a + 1) / (n + 2), (only_b + 1) / (n + 2)
        centre = more - less
        se = sqrt((more + less - centre**2) / (n + 2))
        found = Interval(mean, centre - Z * se, centre + Z * se, se, n).within(-1, 1)
        return Difference(found, p, find_visible(se, inf))

    # other values; NaN for a single question
    se = _se(d)
    if se > 0:  # NaN for a single question
        p = stats.ttest_1samp(d, 0).pvalue
        return Difference(estimate_over_seeds(d), p, find_visible(se, n - 1))
    p = min(1.0, 2 * 0.5**n) if mean else 1.0
    return Difference(_interval(mean, nan, 0, n), p, inf)


def compare_seeds(a: Values, b: Values) -> Difference:
    """Compares the means of independent training runs, (n,) and (m,), by Welch's t test.

    Seeds that all end alike say nothing of how seeds differ: then there is no test, as for a single
    run.
    """
    x, y = _array(a), _array(b)
    mean = round(x.mean() - y.mean(), DIGITS)
    se = hypot(_se(x), _se(y))
    n = len(x) + len(y)
    if not se > 0:  # NaN for a single run
        return Difference(_interval(mean, nan, 0, n), nan, inf)
    with warnings.catch_warnings():
        # seeds that end alike on one side: Welch's test can take it
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_ind(x, y, equal_var=False)
    return Difference(_interval(mean, se, test.df, n), test.pvalue, find_visible(se, test.df))


def average_intervals(parts: Sequence[Interval]) -> Interval:
    """The unweighted mean over benchmarks; their errors are independent, so their squares add.

    Those below and those above the mean are added apart (Zou and Donner, 2008): Wilson's interval
    is lopsided.
    """
    k = len(parts)
    mean = sum(part.mean for part in parts) / k
    low = mean - hypot(*(part.mean - part.low for part in parts)) / k
    high = mean + hypot(*(part.high - part.mean for part in parts)) / k
    se = hypot(*(part.se for part in parts)) / k
    return Interval(mean, low, high, se, sum(part.n for part in parts))


def average_differences(parts: Sequence[Difference]) -> Difference:
    """The macro average of differences, by the normal distribution."""
    whole = average_intervals([part.interval for part in parts])
    p = 2 * stats.norm.sf(abs(whole.mean) / whole.se)
    return Difference(whole, p, find_visible(whole.se, inf))


def adjust_p_values(differences: Mapping[Any, Difference]) -> dict[Any, float]:
    """Adjusts p-values by Holm's method: their family errs in at most 5 % of the cases at 0.05.

    Those without a test (NaN) are left out, and are not part of the family.
    """
    tested = {key: difference.p for key, difference in differences.items() if difference.p >= 0}
    adjusted, worst = dict[Any, float](), 0.0
    for rank, key in enumerate(sorted(tested, key=tested.__getitem__)):
        worst = max(worst, min(1.0, (len(tested) - rank) * tested[key]))
        adjusted[key] = worst
    return adjusted


def find_visible(se: float, df: float) -> float:
    """The true difference that a two-sided t test with this standard error finds at 5 % in 80 % of
    the cases.

    `df` inf is the normal distribution: (1.960 + 0.842) se. Infinite where there is no standard
    error.
    """
    t = stats.t.ppf((1 + LEVEL) / 2, df)
    return special.nctdtrinc(df, 1 - POWER, t) * se if se > 0 else inf


def right_or_wrong(*x: Array) -> bool:
    """Whether all values are zeros and ones."""
    return {*np.concatenate(x).tolist()} <= {0.0, 1.0}


def _array(x: Values) -> Array:
    return np.asarray(x, dtype=np.float64).round(DIGITS)


def _se(x: Array) -> float:
    """The standard error of the mean: NaN for a single value, 0 for equal ones."""
    if len(x) == 1:
        return nan
    return stats.sem(x) if np.ptp(x) else 0.0


def _interval(mean: float, se: float, df: float, n: int) -> Interval:
    """Student's interval; infinite without a standard error."""
    half = stats.t.ppf((1 + LEVEL) / 2, df) * se if df > 0 else inf
    return Interval(mean, mean - half, mean + half, se, n)
