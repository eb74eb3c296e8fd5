"""Compare what evaluate.py has measured: paired differences, McNemar's test, seeds as a second level, power.

    python extras/compare.py runs/evaluation/A runs/evaluation/B           # seeds of one arm: A0,A1,A2 B0,B1,B2

Questions and seeds are two levels and are never pooled into one number: an interval over questions
holds for these trained policies on other questions, one over seeds for other training runs on these
questions. "would have shown": the true difference that a test at 5 % finds in 80 % of the cases,
over seeds where there are some. Where every question is right or wrong, p is McNemar's, exact.
"""

if not __package__:
    import root  # noqa: F401
import json
import warnings
from collections.abc import Mapping, Sequence
from math import hypot, inf, isfinite, nan, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from extras.bench.harness import parser_of
from plumbing.faults import Fault, one_line
from plumbing.files import Row, read_jsonl

Array = npt.NDArray[np.float64]
Values = Sequence[float] | Array
LEVEL, POWER = 0.95, 0.8
Z = stats.norm.ppf((1 + LEVEL) / 2)  # 1.96
DIGITS = 12  # values that differ by rounding count as equal: 57/300 and 0.19


class Interval(NamedTuple):
    """A mean with its 95 % interval, infinite where nothing is known of it, and its standard
    error."""

    mean: float
    low: float
    high: float
    se: float

    def __format__(self, style: str) -> str:
        """As "0.512 [0.490, 0.534]", or with another `style` of its numbers; the mean alone where
        no interval is known."""
        style = style if style.endswith("f") else style + ".3f"
        mean, low, high = (f"{x:{style}}" for x in self[:3])
        known = isfinite(self.low) and self.low < self.high
        return f"{mean} [{low}, {high}]" if known else mean

    def within(self, least: float, most: float) -> "Interval":
        """Cuts the interval at the bounds of a measure, unless the mean shows that it has others."""
        if not isfinite(self.low) or not least <= self.mean <= most:
            return self
        return self._replace(low=max(self.low, least), high=min(self.high, most))


class Difference(NamedTuple):
    """How much higher a is than b, with the p-value of no difference and the smallest one that
    would have shown."""

    interval: Interval
    p: float
    visible: float


def find_visible(se: float, df: float) -> float:
    """The true difference that a two-sided t test with this standard error finds at 5 % in 80 % of
    the cases; `df` inf is the normal distribution."""
    t = stats.t.ppf((1 + LEVEL) / 2, df)
    return special.nctdtrinc(df, 1 - POWER, t) * se if se > 0 else inf


def estimate_over_seeds(x: Values) -> Interval:
    """Student's interval of the mean over training runs (n,), with n - 1 degrees of freedom;
    infinite for one run."""
    a = _array(x)
    return _interval(a.mean(), _se(a), len(a) - 1)


def compare_pairs(a: Values, b: Values) -> Difference:
    """Compares a with b (n,) on the same questions.

    Of right and wrong: Bonett and Price's interval (2012) and McNemar's exact test. Of other
    values: Student's t on the differences (Miller, arXiv 2411.00640).
    """
    x, y = _array(a), _array(b)
    d, n = _array(x - y), len(x)
    if {*x.tolist(), *y.tolist()} <= {0.0, 1.0}:
        only_a, only_b = int((x > y).sum()), int((y > x).sum())
        unlike = only_a + only_b
        p = stats.binomtest(only_a, unlike).pvalue if unlike else 1.0
        more, less = (only_a + 1) / (n + 2), (only_b + 1) / (n + 2)
        centre = more - less
        se = sqrt((more + less - centre**2) / (n + 2))
        found = Interval(d.mean(), centre - Z * se, centre + Z * se, se).within(-1, 1)
        return Difference(found, p, find_visible(se, inf))
    se = _se(d)
    if not se > 0:  # NaN for a single question
        return Difference(_interval(d.mean(), nan, 0), nan, inf)
    p = stats.ttest_1samp(d, 0).pvalue
    return Difference(estimate_over_seeds(d), p, find_visible(se, n - 1))


def compare_seeds(a: Values, b: Values) -> Difference:
    """Compares the means of independent training runs, (n,) and (m,), by Welch's t test.

    Seeds that all end alike say nothing of how seeds differ: then there is no test, as for a single
    run.
    """
    x, y = _array(a), _array(b)
    mean = round(x.mean() - y.mean(), DIGITS)
    se = hypot(_se(x), _se(y))
    if not se > 0:  # NaN for a single run
        return Difference(_interval(mean, nan, 0), nan, inf)
    with warnings.catch_warnings():
        # seeds that end alike on one side: Welch's test can take it
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_ind(x, y, equal_var=False)
    return Difference(_interval(mean, se, test.df), test.pvalue, find_visible(se, test.df))


def average_differences(parts: Sequence[Difference]) -> Difference:
    """The macro average of differences, by the normal distribution. Errors of different sets are
    independent; those below and those above the mean add apart (Zou and Donner, 2008)."""
    k, all_of = len(parts), [part.interval for part in parts]
    mean = sum(x.mean for x in all_of) / k
    low = mean - hypot(*(x.mean - x.low for x in all_of)) / k
    high = mean + hypot(*(x.high - x.mean for x in all_of)) / k
    se = hypot(*(x.se for x in all_of)) / k
    p = 2 * stats.norm.sf(abs(mean) / se)
    return Difference(Interval(mean, low, high, se), p, find_visible(se, inf))


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


def _array(x: Values) -> Array:
    return np.asarray(x, dtype=np.float64).round(DIGITS)


def _se(x: Array) -> float:
    """The standard error of the mean: NaN for a single value, 0 for equal ones."""
    if len(x) == 1:
        return nan
    return stats.sem(x) if np.ptp(x) else 0.0


def _interval(mean: float, se: float, df: float) -> Interval:
    """Student's interval; infinite without a standard error."""
    half = stats.t.ppf((1 + LEVEL) / 2, df) * se if df > 0 else inf
    return Interval(mean, mean - half, mean + half, se)


# ---- evaluations


class Evaluation(NamedTuple):
    """What evaluate.py has written into a directory."""

    name: str
    setting: Row
    metric: str  # the main one
    values: dict[str, Array]  # of that metric, by set of questions, in the order of their ids
    asked: list[tuple[str, str, list[str]]]  # sets, ids and gold answers of these questions


Arm = list[Evaluation]  # what is compared: one evaluation, or one for each seed of a method


def read_evaluation(path: Path) -> Evaluation:
    """Reads summary.json and results.jsonl; Fault if they do not hold a finished evaluation."""
    file = path / "results.jsonl"
    if not file.is_file():
        raise Fault(f"{path}: no finished evaluation is in it; evaluate.py writes one")
    summary = json.loads((path / "summary.json").read_text("utf-8"))
    metric = summary["metrics"][0]
    # by their ids, however the file was sorted since
    rows = sorted(read_jsonl(file), key=lambda row: (row["data"], row["id"]))
    values = {}
    for data in summary["benchmarks"]:
        values[data] = np.array([float(row[metric]) for row in rows if row["data"] == data])
    asked = [(row["data"], row["id"], row["golds"]) for row in rows]
    return Evaluation(path.name, summary["setting"], metric, values, asked)


def check_alike(evaluations: Sequence[Evaluation]) -> None:
    """Raises Fault for one that measures something else than the first one."""
    first = evaluations[0]
    for other in evaluations:
        if (first.metric, first.asked) != (other.metric, other.asked):
            raise Fault(
                f"{first.name} and {other.name} differ in metric, questions or gold answers: evaluate both with the"
                " same --data, --n and --seed"
            )


def compare(directories: Sequence[str]) -> str:
    """Returns a Markdown table of every arm against the first one, by set of questions and on
    average."""
    arms = [[read_evaluation(Path(name)) for name in names.split(",")] for names in directories]
    (first, *_), *others = arms
    unlike: dict[str, str] = {}
    for other in sum(arms, []):
        check_alike([first, other])
        for name in first.setting.keys() - {"what", "data", "out", "instruction"}:
            if first.setting[name] != other.setting.get(name):
                unlike[name] = (
                    f"{name} {first.setting[name]!s:.60}, not {other.setting.get(name)!s:.60}"
                )

    # a row for each arm and set, and one for the average over the sets
    sets = [[data] for data in first.values]
    if len(sets) > 1:
        sets.append([*first.values])
    rows = []
    tests: dict[str, Difference] = {}
    for arm in others:
        for data in sets:
            row, tests[name_arm(arm)] = compare_arms(arm, arms[0], data)
            rows.append(row)
    temperature = first.setting.get("temperature", 0)
    out = f"Differences from {name_arm(arms[0])}, at temperature {temperature:g}.\n\n{format_table(rows)}"
    if len(others) > 1:
        told = ", ".join(f"{name} {p:.2g}" for name, p in adjust_p_values(tests).items())
        out += f"\nHolm's p over the {len(others)} comparisons: {told}"
    if unlike:
        out += f"\nThey also differ in this: {'; '.join(unlike.values())}."
    return out


def name_arm(arm: Arm) -> str:
    """Names an arm by the directory of its first evaluation."""
    return arm[0].name + (f" and {len(arm) - 1} more" if len(arm) > 1 else "")


def compare_arms(arm: Arm, first: Arm, data: list[str]) -> tuple[dict[str, str], Difference]:
    """Compares an arm with the first one on some sets of questions.

    Returns a row of the table, and the difference over seeds, or over questions without a test of
    seeds.
    """
    parts = []
    for name in data:
        # each question averaged over the seeds
        a, b = (np.mean([e.values[name] for e in arm], axis=0) for arm in (arm, first))
        parts.append(compare_pairs(a, b))
    questions = average_differences(parts) if len(parts) > 1 else parts[0]
    # each seed averaged over its questions, then over the sets
    a, b = (
        [float(np.mean([e.values[name].mean() for name in data])) for e in arm]
        for arm in (arm, first)
    )
    seeds = compare_seeds(a, b)
    tested = not np.isnan(seeds.p)
    best = seeds if tested else questions
    row = {
        "": name_arm(arm),
        "benchmark": data[0] if len(data) == 1 else "average",
        arm[0].metric: f"{np.mean(a):.3f}, {np.mean(b):.3f}",
        "difference over questions, 95 %": f"{questions.interval:+}",
        "p": f"{questions.p:.2g}" if questions.p >= 0 else "",
        "difference over seeds, 95 %": f"{seeds.interval:+}" if tested else "",
        "p over seeds": f"{seeds.p:.2g}" if tested else "",
        "would have shown": f"{best.visible:.3f}" if isfinite(best.visible) else "",
    }
    return row, best


def format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of rows, each a cell by its heading."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [heads, *([row.get(head, "") for head in heads] for row in rows)]
    lines = [f"| {' | '.join(line)} |\n" for line in cells]
    lines.insert(1, "|---" * len(heads) + "|\n")
    return "".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "extras/compare.py")
    parser.add_argument("arms", nargs="+", metavar="DIR", help="seeds of one arm joined by commas")
    with one_line("extras/compare.py"):
        print(compare(parser.parse_args(argv).arms))


if __name__ == "__main__":
    main()
