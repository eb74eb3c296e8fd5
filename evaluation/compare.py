"""Two evaluations or more side by side: paired differences, McNemar's test, seeds as a second
level, power."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evaluation.measure import SHARES, format_table, label
from evaluation.statistics import (
    Array,
    Difference,
    adjust_p_values,
    average_differences,
    compare_pairs,
    compare_seeds,
)
from plumbing.faults import Fault
from plumbing.files import Row, read_jsonl
from plumbing.outside import decoded


class Evaluation(NamedTuple):
    """What evaluate.py has written into a directory."""

    path: Path
    setting: Row
    metric: str  # the main one
    measured: str  # it, and of which task
    values: dict[str, Array]  # of that metric, by set of questions, in the order of their ids
    asked: dict[str, list[tuple[str, list[str]]]]  # ids and gold answers of these questions


Arm = list[Evaluation]  # what is compared: one evaluation, or one for each seed of a method


def name_arm(arm: Arm) -> str:
    """Names an arm by the directory of its first evaluation."""
    first, *others = arm
    return first.path.name + (f" and {len(others)} more" if others else "")


def by_question(arm: Arm, data: str) -> Array:
    """Averages each question over the seeds."""
    return np.mean([e.values[data] for e in arm], axis=0)


def by_seed(arm: Arm, data: Sequence[str]) -> list[float]:
    """Averages each seed over its questions, then over the sets."""
    return [np.mean([e.values[d].mean() for d in data]) for e in arm]


def read_evaluation(path: Path) -> Evaluation:
    """Reads summary.json and results.jsonl; Fault if they do not hold a finished evaluation."""
    try:
        summary = decoded((path / "summary.json").read_bytes())
        setting, metric = summary["setting"], summary["metrics"][0]
        measured = f"{metric} of {setting['task']}"
        # by their ids, however the file was sorted since
        rows = sorted(read_jsonl(path / "results.jsonl"), key=lambda row: row["id"])
        values, asked = {}, {}
        for data, part in summary["benchmarks"].items():
            own = [row for row in rows if row["data"] == data]
            values[data] = np.array([float(row[metric]) for row in own])
            asked[data] = [(row["id"], row["golds"]) for row in own]
            whole = len(values[data]) == part["questions"] > 0
            if not (whole and np.isfinite(values[data]).all()):
                raise ValueError  # it has not finished
        if not values:
            raise ValueError
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise Fault(
            f"--compare {path}: no finished evaluation of this version is in it; evaluate.py writes one"
        ) from None
    return Evaluation(path, setting, metric, measured, values, asked)


def check_comparable(one: Evaluation, other: Evaluation) -> dict[str, str]:
    """Says by name what differs; Fault unless both measure the same thing on the same questions
    with the same gold answers."""
    paths = f"{one.path} and {other.path}"
    if one.measured != other.measured:
        raise Fault(
            f"--compare: {paths} measure {one.measured} and {other.measured}: compare evaluations of one task"
        )
    if one.asked != other.asked:
        raise Fault(
            f"--compare: {paths} differ in questions or gold answers: evaluate both with the same --data, --n and"
            " --seed"
        )
    unlike = {}
    for name in sorted((one.setting | other.setting).keys() - {"data", "model"}):
        a, b = (e.setting.get(name, "") for e in (one, other))
        if a != b:
            unlike[name] = f"{name} {a!s:.60}, not {b!s:.60}"
    return unlike


def compare(directories: Sequence[str]) -> str:
    """Returns a Markdown table of every arm against the first one, by set of questions and on
    average."""
    # what is compared, and whether it can be
    arms = [[read_evaluation(Path(name)) for name in names.split(",")] for names in directories]
    if len(arms) < 2:
        raise Fault("--compare: give two evaluations or more")
    first, *others = arms
    unlike: dict[str, str] = {}
    for arm in arms:
        if len({evaluation.path.resolve() for evaluation in arm}) < len(arm):
            raise Fault(
                f"--compare: {name_arm(arm)}: one of them is there twice; a seed counts once"
            )
        for evaluation in arm:
            unlike |= check_comparable(first[0], evaluation)

    # a row for each arm and set, and one for the average over the sets
    sets = list(first[0].values)
    shown = [[data] for data in sets]
    if len(sets) > 1:
        shown.append(sets)
    rows = []
    tests: dict[int, Difference] = {}
    for k, arm in enumerate(others):
        for data in shown:
            row, tests[k] = compare_arms(arm, first, data)
            rows.append(row)

    # the text
    out = [f"Differences from {name_arm(first)}.", "", format_table(rows)]
    if len(others) > 1:
        adjusted = adjust_p_values(tests)
        told = [
            f"{name_arm(arm)} {format_p(adjusted.get(k, math.nan)) or 'no test'}"
            for k, arm in enumerate(others)
        ]
        out.append(f"Holm's p over the {len(others)} comparisons: {', '.join(told)}")
    if unlike:
        out.append(f"They also differ in this: {'; '.join(unlike.values())}.")
    out.append(
        "Intervals over questions hold for these policies, those over seeds for other training runs. A test at 5 %\n"
        'finds a true difference as large as "would have shown" in 80 % of the cases: over seeds, where there are\n'
        "some. Where every question is right or wrong, p is that of McNemar's exact test."
    )
    return "\n".join(out)


def compare_arms(arm: Arm, first: Arm, data: list[str]) -> tuple[dict[str, str], Difference]:
    """Compares an arm with the first one on some sets of questions.

    Returns a row of the table, and the difference over seeds, or over questions without a test of
    seeds.
    """
    parts = [compare_pairs(by_question(arm, name), by_question(first, name)) for name in data]
    questions = average_differences(parts) if len(parts) > 1 else parts[0]
    a, b = by_seed(arm, data), by_seed(first, data)
    seeds = compare_seeds(a, b)
    tested = not np.isnan(seeds.p)
    best = seeds if tested else questions
    most = 1.0 if arm[0].metric in SHARES else math.inf
    row = {
        "": name_arm(arm),
        "benchmark": data[0] if len(data) == 1 else "average",
        "questions": f"{questions.interval.n:,}",
        label(arm[0].metric): f"{np.mean(a):.3f}, {np.mean(b):.3f}",
        "difference over questions, 95 %": f"{questions.interval.within(-most, most):+}",
        "p": format_p(questions.p),
        "difference over seeds, 95 %": f"{seeds.interval.within(-most, most):+}" if tested else "",
        "p over seeds": format_p(seeds.p),
        "would have shown": f"{best.visible:.3f}" if np.isfinite(best.visible) else "",
    }
    return row, best


def format_p(p: float) -> str:
    if np.isnan(p):
        return ""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
