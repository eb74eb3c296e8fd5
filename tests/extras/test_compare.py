"""Paired tests, intervals and power against formulas worked out by hand, textbooks and simulation; tables of
evaluations."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from extras.compare import (
    Difference,
    Interval,
    adjust_p_values,
    compare,
    compare_pairs,
    compare_seeds,
    estimate_over_seeds,
)
from plumbing.faults import Fault

T4 = 2.7764451  # Student's t, 4 degrees of freedom, 97.5 %


def test_over_seeds_it_is_students_even_at_zero_and_one_and_a_single_one_has_no_interval():
    assert estimate_over_seeds([1.0, 1.0]).high == 1.0
    found = estimate_over_seeds([0.93, 0.96, 0.96, 0.95, 0.96])
    assert found.high - found.mean == pytest.approx(T4 * 0.0130384 / math.sqrt(5), abs=1e-6)
    assert estimate_over_seeds([0.9]).low == -math.inf
    assert np.std([57 / 300] * 3, ddof=1) > 0  # rounding alone
    assert estimate_over_seeds([57 / 300] * 3).se == 0


def test_paired_differences():
    # d = 1, 1, -1, 1, 1: mean 0.6, variance 0.8, standard error 0.4, t = 1.5
    found = compare_pairs([2, 1, 1, 1, 1], [1, 0, 2, 0, 0])
    wanted = (0.6, 0.6 - T4 * 0.4, 0.6 + T4 * 0.4, 0.4)
    assert found.interval == pytest.approx(wanted, abs=1e-6)
    # two-sided, t = 1.5 with 4 degrees of freedom
    assert found.p == pytest.approx(0.2080000, abs=1e-6)
    same = compare_pairs([1.5, 2.5], [1, 2])  # equal differences say nothing of how they differ
    assert math.isnan(same.p) and f"{same.interval:+}" == "+0.500"


@pytest.mark.parametrize("n", [1, 40])
def test_of_right_and_wrong_the_paired_test_is_the_sign_test(n):
    found = compare_pairs([1] * n, [0] * n)
    assert found.p == pytest.approx(2 * 0.5**n)  # n coins that fall on one side
    assert -1 <= found.interval.low < found.interval.mean == found.interval.high == 1
    alike = compare_pairs([1] * n, [1] * n)
    assert alike.p == 1.0 and 0 < alike.visible < math.inf


@pytest.mark.filterwarnings("error")
def test_welch_between_seeds():
    found = compare_seeds([2, 4, 6, 8], [1, 2, 3])  # means 5 and 2; squared errors 5/3 and 1/3
    df = 4 / ((5 / 3) ** 2 / 3 + (1 / 3) ** 2 / 2)
    t = stats.t.ppf(0.975, df)
    assert found.interval[:2] == pytest.approx((3, 3 - t * math.sqrt(2)))
    assert found.p == pytest.approx(2 * stats.t.sf(3 / math.sqrt(2), df))
    # one seed, and seeds that all end alike
    for a, b in (([0.9], [0.2, 0.2]), ([57 / 300] * 3, [0.19] * 3)):
        found = compare_seeds(a, b)
        assert math.isnan(found.p) and found.interval.low == -math.inf and found.visible == math.inf


@pytest.mark.parametrize(
    "p, adjusted",
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        # one without a test is none of the family
        ([math.nan, 0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
    ],
)
def test_holm(p, adjusted):
    told = adjust_p_values({k: Difference(Interval(0, 0, 0, 0), x, 0.0) for k, x in enumerate(p)})
    assert [told[k] for k in sorted(told)] == pytest.approx(adjusted)


# ---- evaluations


def evaluation(path, metric="em", golds=("x",), setting=None, **by_data):
    """Writes what evaluate.py leaves; returns its directory."""
    path.mkdir()
    rows = [
        {"data": name, "id": f"{name}-{k}", "golds": golds, metric: x}
        for name, some in by_data.items()
        for k, x in enumerate(some)
    ]
    (path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"setting": {"task": "SearchQA"} | (setting or {}), "metrics": [metric]}
    summary["benchmarks"] = dict.fromkeys(by_data, {})
    (path / "summary.json").write_text(json.dumps(summary))
    return str(path)


def cells_of(text):
    """The rows of a Markdown table, each a cell by its heading."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_two_greedy_runs_are_paired_by_question(tmp_path):
    a = evaluation(tmp_path / "base", nq=[0] * 8 + [1] + [1] * 5 + [0] * 6)
    b = evaluation(tmp_path / "new", nq=[1] * 8 + [0] + [1] * 5 + [0] * 6)
    [row] = cells_of(compare([a, b]))
    assert (row[""], row["benchmark"], row["em"]) == ("new", "nq", "0.650, 0.300")
    assert row["difference over questions, 95 %"].startswith("+0.350 [")
    assert row["p"] == "0.039"  # McNemar's: 8 that only one has right, 1 that only the other has
    # one seed says nothing of others
    assert row["p over seeds"] == row["difference over seeds, 95 %"] == ""


def test_seeds_are_a_level_of_their_own_with_holm_over_the_arms(tmp_path):
    def arm(name, *seeds):
        paths = []
        for k, n in enumerate(seeds):
            right = [1] * n + [0] * (20 - n)
            paths.append(evaluation(tmp_path / f"{name}{k}", nq=right, popqa=right))
        return ",".join(paths)

    text = compare([arm("base", 4, 5, 6), arm("good", 14, 15, 16), arm("same", 5, 6, 4)])
    good = {row["benchmark"]: row for row in cells_of(text) if row[""].startswith("good")}
    assert list(good) == ["nq", "popqa", "average"] and good["average"]["em"] == "0.750, 0.250"
    half = T4 * np.hypot(0.05, 0.05) / np.sqrt(3)
    shown = f"+0.500 [{0.5 - half:+.3f}, {0.5 + half:+.3f}]"
    assert good["average"]["difference over seeds, 95 %"] == shown
    assert "Holm's p over the 2 comparisons: good0 and 2 more" in text


def test_what_measures_something_else_is_refused_and_other_settings_are_named(tmp_path):
    a = evaluation(tmp_path / "a", nq=[1, 0, 1])
    for other in (
        evaluation(tmp_path / "b", nq=[1, 0]),
        evaluation(tmp_path / "miles", "miles", nq=[1, 0, 1]),
    ):
        with pytest.raises(Fault, match="differ in metric, questions or gold answers"):
            compare([a, other])
    with pytest.raises(Fault, match="no finished evaluation"):
        compare([a, str(tmp_path)])
    four = evaluation(tmp_path / "four", setting={"max_turns": 4, "temperature": 1.0}, nq=[1, 0, 1])
    assert "at temperature 1." in compare([four, a])
    assert "max_turns 4, not None" in compare([four, a]) and "max_turns" not in compare([a, a])
