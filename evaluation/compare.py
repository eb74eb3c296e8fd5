"""Two evaluations or more side by side: paired differences, McNemar's test, seeds as a second
level, power."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluation.measure import markdown
from evaluation.statistics import (
    Array,
    Difference,
    adjust,
    between_seeds,
    macro_difference,
    mcnemar,
    over_seeds,
    paired,
    right_or_wrong,
)
from journal.record import differences
from journal.summary import SHARES, label
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from plumbing.outside import decoded


class Evaluation(NamedTuple):
    """What evaluate.py has written into a directory."""

    path: Path
    setting: dict[str, Any]
    metric: str  # the main one
    values: dict[str, Array]  # of that metric, by set of questions, in the order of the questions


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
    return [float(np.mean([e.values[d].mean() for d in data])) for e in arm]


def read(path: Path) -> Evaluation:
    """Reads summary.json and results.jsonl; Fault if they do not hold a finished evaluation."""
    try:
        summary = decoded((path / "summary.json").read_bytes())
        metric, sizes = (
            summary["metrics"][0],
            {data: part["questions"] for data, part in summary["benchmarks"].items()},
        )
        rows = read_jsonl(path / "results.jsonl")
        values = {
            data: np.array([float(row[metric]) for row in rows if row["data"] == data])
            for data in sizes
        }
        finished = sizes == {data: len(x) for data, x in values.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        finished = False
    if not finished:
        raise Fault(f"--compare {path}: no finished evaluation is in it; evaluate.py writes one")
    return Evaluation(path, summary["setting"], metric, values)


def check_comparable(one: Evaluation, other: Evaluation) -> list[str]:
    """Names what differs; Fault unless both measure the same thing on the same questions with the
    same gold answers."""
    paths = f"{one.path} and {other.path}"
    measured = [f"{x.metric} of {x.setting['task']}" for x in (one, other)]
    if measured[0] != measured[1]:
        raise Fault(
            f"--compare: {paths} measure {' and '.join(measured)}: compare evaluations of one task"
        )
    unlike = list(differences(one.setting, other.setting, ("data",)))
    if others := [name for name in unlike if name.startswith(("questions of ", "golds of "))]:
        raise Fault(
            f"--compare: {paths} differ in the {others[0]}: evaluate both with the same --data, --n and --seed"
        )
    return unlike


def compare(directories: Sequence[str]) -> str:
    """Returns a Markdown table of every arm against the first one, by set of questions and on
    average."""
    first, *others = ([read(Path(name)) for name in names.split(",")] for names in directories)
    if not others:
        raise Fault("--compare: give two evaluations or more")
    one, *rest = [e for arm in (first, *others) for e in arm]
    unlike = dict.fromkeys(
        name for evaluation in rest for name in check_comparable(one, evaluation)
    )
    rows, headline = list[dict[str, str]](), list[Difference]()
    sets = list(one.values)
    for arm in others:
        parts = [paired(by_question(arm, data), by_question(first, data)) for data in sets]
        rows += [cells(arm, first, [data], part) for data, part in zip(sets, parts, strict=True)]
        whole = parts[0]
        if len(sets) > 1:
            whole = macro_difference(parts)
            rows.append(cells(arm, first, sets, whole))
        seeds = between_seeds(by_seed(arm, sets), by_seed(first, sets))
        headline.append(whole if np.isnan(seeds.p) else seeds)
    out = [f"Differences from {name_arm(first)}.", "", markdown(rows)]
    if len(others) > 1:
        p = adjust(dict(enumerate(headline)))
        shown = [
            f"{name_arm(arm)} {p_value(p[k]) if k in p else 'no test'}"
            for k, arm in enumerate(others)
        ]
        out.append(f"Holm's p over the {len(others)} comparisons: {', '.join(shown)}")
    if unlike:
        out.append(
            f"Not all of these were made with the same {', '.join(unlike)}: summary.json has the values."
        )
    out.append(
        "Intervals over questions hold for these policies, those over seeds for other training runs. A test at 5 %\n"
        "finds a true difference called visible in 80 % of the cases; a smaller one cannot be told here. Where every\n"
        "question is right or wrong, p is that of McNemar's exact test."
    )
    return "\n".join(out)


def cells(arm: Arm, first: Arm, data: list[str], difference: Difference) -> dict[str, str]:
    """A row of the table: an arm against the first one on some sets of questions."""
    a, b = by_seed(arm, data), by_seed(first, data)
    x, y = by_question(arm, data[0]), by_question(first, data[0])
    seeds = between_seeds(a, b)
    most = 1.0 if arm[0].metric in SHARES else math.inf
    visible = difference.visible, seeds.visible
    tested, single = not np.isnan(seeds.p), len(data) == 1 and right_or_wrong(x, y)
    return {
        "": name_arm(arm),
        "benchmark": data[0] if len(data) == 1 else "average",
        "questions": f"{difference.interval.n:,}",
        label(arm[0].metric): f"{over_seeds(a).mean:.3f}, {over_seeds(b).mean:.3f}",
        "difference over questions, 95 %": f"{difference.interval.within(-most, most):+}",
        "p": p_value(difference.p),
        "only this right, only that": "{}, {}".format(*mcnemar(x, y)) if single else "",
        "difference over seeds, 95 %": f"{seeds.interval.within(-most, most):+}" if tested else "",
        "p over seeds": p_value(seeds.p),
        "visible: questions, seeds": ", ".join(f"{x:.3f}" for x in visible if np.isfinite(x)),
    }


def p_value(p: float) -> str:
    return "" if np.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
