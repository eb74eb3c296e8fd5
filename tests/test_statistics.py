"""Intervals, paired tests and power against formulas worked out by hand, tables of textbooks, and
simulation."""

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics import (
    Difference,
    Interval,
    adjust_p_values,
    average_differences,
    average_intervals,
    compare_pairs,
    compare_seeds,
    estimate_mean,
    estimate_over_seeds,
    find_visible,
)

T4 = 2.7764451  # Student's t, 4 degrees of freedom, 97.5 %


def test_of_zeros_and_ones_the_interval_is_wilsons():
    found = estimate_mean([1] * 7 + [0] * 3)
    z, p, n = 1.959964, 0.7, 10
    centre, half = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)),
    )
    half *= z / (1 + z * z / n)
    assert found.mean == pytest.approx(0.7) and (found.low, found.high) == pytest.approx(
        (centre - half, centre + half), abs=1e-6
    )
    # Wilson's, worked out
    assert (found.low, found.high) == pytest.approx((0.39677, 0.89221), abs=1e-4)
    none = estimate_mean(
        [0.0] * 125
    )  # no right answer in Bamboogle is no proof of an accuracy of 0
    assert (none.mean, none.low) == (0.0, 0.0) and none.high == pytest.approx(
        z * z / (125 + z * z), abs=1e-6
    )


def test_of_other_values_it_is_students():
    found = estimate_mean([0.2, 0.4, 0.6, 0.8, 1.0])
    se = math.sqrt(0.1 / 5)
    assert (found.mean, found.se, found.n) == pytest.approx((0.6, se, 5))
    assert (found.low, found.high) == pytest.approx((0.6 - T4 * se, 0.6 + T4 * se), abs=1e-6)


def test_seeds_are_students_even_at_zero_and_one_and_a_single_one_has_no_interval():
    assert estimate_over_seeds([1.0, 1.0]).high == 1.0
    found = estimate_over_seeds([0.93, 0.96, 0.96, 0.95, 0.96])
    assert found.high - found.mean == pytest.approx(T4 * 0.0130384 / math.sqrt(5), abs=1e-6)
    assert estimate_over_seeds([0.9]).low == -math.inf


@pytest.mark.parametrize(
    "x, least, most, low, high",
    [
        # t of 2 degrees of freedom, standard error 0.1
        ([1.0, 1.0, 0.7], 0, 1, 0.9 - 4.302653 * 0.1, 1.0),
        ([0.0, 0.0, 0.3], 0, 1, 0.0, 0.1 + 4.302653 * 0.1),
        ([0.6, 0.4], 0, 1, 0.0, 1.0),  # t is 12.7: nothing is known
        ([-0.9, -1.0], -1, 1, -1.0, -0.95 + 12.7062 * 0.05),
        # percentages
        ([90, 100, 80], 0, 1, 90 - 4.302653 * 10 / 3**0.5, 90 + 4.302653 * 10 / 3**0.5),
        ([3.0, 5.0], 0, math.inf, 0.0, 4 + 12.7062),
    ],
)
def test_an_interval_stays_within_the_bounds_of_what_is_measured(x, least, most, low, high):
    found = estimate_over_seeds(x).within(least, most)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert (found.mean, found.se, found.n) == estimate_over_seeds(x)[:1] + estimate_over_seeds(x)[
        3:
    ]


def test_an_interval_that_is_cut_covers_as_often():
    """By simulation: EM of five runs that end near 1, whose true mean is 0.9."""
    rng, hits = np.random.default_rng(5), [0, 0]
    for _ in range(2000):
        found = estimate_over_seeds(rng.beta(9, 1, 5))
        for k, (_, low, high, *_) in enumerate((found, found.within(0, 1))):
            hits[k] += low <= 0.9 <= high
    assert hits[0] == hits[1] > 1700


def test_paired_differences():
    # d = 1, 1, -1, 1, 1: mean 0.6, variance 0.8, standard error 0.4, t = 1.5
    a, b = [2, 1, 1, 1, 1], [1, 0, 2, 0, 0]
    found = compare_pairs(a, b)
    assert (found.interval.mean, found.interval.se) == pytest.approx((0.6, 0.4))
    assert (found.interval.low, found.interval.high) == pytest.approx(
        (0.6 - T4 * 0.4, 0.6 + T4 * 0.4), abs=1e-6
    )
    # two-sided, t = 1.5 with 4 degrees of freedom
    assert found.p == pytest.approx(0.2080000, abs=1e-6)


@pytest.mark.parametrize("n", [1, 3, 5, 6, 40])
def test_of_right_and_wrong_the_paired_test_is_the_sign_test_however_alike_the_differences(n):
    found = compare_pairs([1] * n, [0] * n)
    assert found.p == pytest.approx(2 * 0.5**n)  # n coins that fall on one side
    assert -1 <= found.interval.low < found.interval.mean == found.interval.high == 1
    assert (
        compare_pairs([1] * n, [1] * n).p == 1.0
        and 0 < compare_pairs([1] * n, [1] * n).visible < math.inf
    )


def test_the_interval_of_right_and_wrong_covers_the_true_difference():
    """By simulation, where most sets have hardly a question that the two answer differently."""
    rng, hits = np.random.default_rng(3), 0
    for _ in range(2000):
        a, b = rng.random(40) < 0.03, rng.random(40) < 0.01
        low, high = compare_pairs(a * 1.0, b * 1.0).interval[1:3]
        hits += low <= 0.02 <= high
    assert hits / 2000 > 0.93


def test_differences_that_are_one_number_have_the_sign_test_and_no_interval():
    # whose differences from those shifted by 0.1 differ by rounding
    tenths = np.array([1, 2, 3, 4, 5, 6]) / 10
    found = compare_pairs(tenths + 0.1, tenths)
    assert len({*(tenths + 0.1 - tenths).tolist()}) > 1 and found.p == 2 * 0.5**6
    assert (found.interval.low, found.visible) == (-math.inf, math.inf)
    assert f"{found.interval:+}" == "+0.100" and compare_pairs(tenths + 0.1 - 0.1, tenths).p == 1.0


def test_seeds_that_differ_by_rounding_alone_have_no_test():
    assert np.std([57 / 300] * 3, ddof=1) > 0  # numpy's mean of them is another number
    for a, b in (
        ([57 / 300] * 3, [56 / 300] * 3),
        ([0.19] * 3, [57 / 300] * 3),
        ([0.6, 0.6], [0.5, 0.5]),
    ):
        found = compare_seeds(a, b)
        assert math.isnan(found.p) and found.interval.low == -math.inf and found.visible == math.inf
    assert estimate_over_seeds([57 / 300] * 3).se == 0


def test_pairing_sees_what_two_separate_intervals_do_not():
    rng = np.random.default_rng(0)
    b = rng.random(400)
    a = b + rng.normal(0.05, 0.1, 400)
    alone = math.hypot(estimate_mean(a).se, estimate_mean(b).se)
    assert compare_pairs(a, b).interval.se < alone / 3 and compare_pairs(a, b).interval.low > 0


def test_mcnemar_is_the_binomial_of_the_discordant():
    a = [1] * 8 + [0] * 1 + [1] * 20 + [0] * 11
    b = [0] * 8 + [1] * 1 + [1] * 20 + [0] * 11
    assert compare_pairs(a, b).p == pytest.approx(2 * (1 + 9) / 2**9)
    assert compare_pairs([1, 0], [1, 0]).p == 1.0


def test_the_macro_average_adds_squared_errors_and_weighs_benchmarks_alike():
    parts = [Interval(0.3, 0.22, 0.36, 0.04, 125), Interval(0.5, 0.494, 0.506, 0.003, 14267)]
    found = average_intervals(parts)
    se = math.sqrt(0.04**2 + 0.003**2) / 2
    assert (found.mean, found.se, found.n) == pytest.approx((0.4, se, 14392))
    assert found.low == pytest.approx(0.4 - math.sqrt(0.08**2 + 0.006**2) / 2)
    assert found.high == pytest.approx(0.4 + math.sqrt(0.06**2 + 0.006**2) / 2)
    difference = average_differences([Difference(part, 0.0, 0.0) for part in parts])
    assert difference.p == pytest.approx(math.erfc(0.4 / se / math.sqrt(2)))


def test_the_macro_average_covers_the_truth_near_0_and_1():
    """Two small sets of which a policy knows nearly nothing, and one of which it knows nearly
    all."""
    rng, rates, hits = np.random.default_rng(0), (0.01, 0.02, 0.98), 0
    for _ in range(500):
        found = average_intervals([estimate_mean((rng.random(60) < p) * 1.0) for p in rates])
        hits += found.low <= sum(rates) / 3 <= found.high
    assert hits / 500 > 0.93
    nothing = average_intervals([estimate_mean([0] * 60), estimate_mean([1] * 60)])
    assert nothing.low < 0.5 < nothing.high and nothing.se > 0


def test_the_macro_average_agrees_with_a_bootstrap_by_benchmark():
    rng = np.random.default_rng(1)
    pairs = [(rng.random(n) < 0.5, rng.random(n) < 0.4) for n in (60, 125, 300)]
    found = average_differences([compare_pairs(a * 1.0, b * 1.0) for a, b in pairs])
    draws = np.zeros(4000)
    for a, b in pairs:
        d = a * 1.0 - b
        draws += d[rng.integers(len(d), size=(4000, len(d)))].mean(1) / 3
    assert found.interval.se == pytest.approx(draws.std(), rel=0.06)


def test_welch_between_seeds():
    found = compare_seeds([2, 4, 6, 8], [1, 2, 3])  # means 5 and 2; squared errors 5/3 and 1/3
    df = 4 / ((5 / 3) ** 2 / 3 + (1 / 3) ** 2 / 2)
    assert (found.interval.mean, found.interval.se, found.interval.n) == pytest.approx(
        (3, math.sqrt(2), 7)
    )
    t = stats.t.ppf(0.975, df)
    assert found.interval.low == pytest.approx(3 - t * math.sqrt(2))
    assert found.p == pytest.approx(2 * stats.t.sf(3 / math.sqrt(2), df))
    one = compare_seeds([0.9], [0.2, 0.2])
    assert (
        math.isnan(one.p)
        and one.interval.low == -math.inf
        and one.interval.mean == pytest.approx(0.7)
    )


def holm(p):
    """Returns the adjusted p-values in the order given; those without a test are left out."""
    told = adjust_p_values(
        {k: Difference(Interval(0, 0, 0, 0, 2), x, 0.0) for k, x in enumerate(p)}
    )
    return [told[k] for k in sorted(told)]


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.001, 0.4, 0.9]) == pytest.approx([1.0, 0.004, 1.0, 1.0])
    assert holm([]) == []
    nan = math.nan
    # none of the family of 3
    for p in ([nan, 0.01, 0.04, 0.03], [0.01, nan, 0.04, 0.03], [0.01, 0.04, 0.03, nan]):
        assert holm(p) == pytest.approx([0.03, 0.06, 0.06])


@pytest.mark.parametrize("n", [3, 5, 300])
def test_a_visible_difference_is_found_in_four_of_five_simulated_experiments(n):
    rng = np.random.default_rng(n)
    shift = find_visible(1 / math.sqrt(n), n - 1)  # the true standard deviation is 1
    x = rng.normal(shift, 1, size=(20000, n))
    t = x.mean(1) / (x.std(1, ddof=1) / math.sqrt(n))
    assert np.mean(np.abs(t) > stats.t.ppf(0.975, n - 1)) == pytest.approx(0.8, abs=0.012)


def test_visible_by_the_normal_distribution():
    assert find_visible(0.01, math.inf) == pytest.approx(0.0280159, abs=1e-6)
    assert find_visible(0.0, 4) == math.inf  # nothing is known of how values differ


@pytest.mark.filterwarnings("error")
def test_seeds_that_end_alike_on_one_side_have_a_test():
    """By hand: se = sd / sqrt(3) of the other side alone, with its 2 degrees of freedom."""
    found = compare_seeds([0.9, 0.92, 0.97], [0.19, 0.19, 0.19])
    se = statistics.stdev([0.9, 0.92, 0.97]) / math.sqrt(3)
    assert found.interval.se == pytest.approx(se) and found.interval.mean == pytest.approx(0.74)
    # t of 2 at 97.5 %
    assert found.interval.high - found.interval.mean == pytest.approx(4.302653 * se, rel=1e-6)
    assert 0 < found.p < 0.001


def test_an_interval_in_words_and_holm_over_those_that_have_a_p():
    assert f"{estimate_over_seeds([0.4, 0.6])}" == "0.500 [-0.771, 1.771]"  # 12.7062 x 0.1
    assert (
        f"{Interval(0.25, 0.1, 0.4, 0.05, 9):+}" == "+0.250 [+0.100, +0.400]"
        and f"{estimate_over_seeds([0.5])}" == "0.500"
    )
    assert f"{Interval(2500, 1000, 4000.4, 5, 9):+,.0f}" == "+2,500 [+1,000, +4,000]"
    parts = {"a": 0.01, "b": math.nan, "c": 0.04}
    told = adjust_p_values(
        {name: Difference(Interval(0, 0, 0, 0, 2), p, 0.0) for name, p in parts.items()}
    )
    assert told == {"a": pytest.approx(0.02), "c": pytest.approx(0.04)}
