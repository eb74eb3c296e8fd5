"""Two evaluations or more side by side: paired differences, McNemar's test, seeds as a second level, power."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluation.statistics import (
    Difference,
    between_seeds,
    holm,
    macro_difference,
    mcnemar,
    over_seeds,
    paired,
    right_or_wrong,
)
from journal.directory import read_jsonl
from journal.summary import label
from plumbing.faults import Fault
from plumbing.outside import decoded

Row = dict[str, Any]
Means = dict[str, dict[str, float]]  # set of questions -> question -> the task's first metric, mean over its samples
TOLD_APART = ("what", "method", "instruction", "model", "seed", "n", "data", "questions")  # by what is compared


class Arm(NamedTuple):
    """What is compared: one evaluation, or one for each seed of a method."""

    name: str
    summaries: list[Row]
    seeds: list[Means]

    def mean(self, data: str) -> dict[str, float]:
        """Averages each question over the seeds."""
        return {q: float(np.mean([seed[data][q] for seed in self.seeds])) for q in self.seeds[0][data]}

    def of_seeds(self, data: Sequence[str]) -> list[float]:
        """Averages each seed over its questions, then over the sets."""
        return [float(np.mean([np.mean(list(seed[d].values())) for d in data])) for seed in self.seeds]


def read(directories: str) -> Arm:
    """Reads the evaluations of one arm, separated by commas."""
    paths = [Path(name) for name in directories.split(",")]
    summaries, seeds = zip(*map(evaluation, paths), strict=True)
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Arm(paths[0].name + more, list(summaries), list(seeds))


def evaluation(path: Path) -> tuple[Row, Means]:
    """Reads summary.json and results.jsonl; Fault if they do not hold a finished evaluation."""
    values: dict[str, dict[str, list[float]]] = {}
    try:
        summary: Row = decoded((path / "summary.json").read_text())
        for row in read_jsonl(path / "results.jsonl"):
            samples = values.setdefault(row["data"], {}).setdefault(row["id"], [])
            samples.append(float(row[summary["metrics"][0]]))
        finished = {data: part["questions"] for data, part in summary["benchmarks"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        finished = {}
    if not finished or finished != {data: len(of_data) for data, of_data in values.items()}:
        raise Fault(f"--compare {path}: no finished evaluation is in it; evaluate.py writes one")
    means = {data: {q: sum(x) / len(x) for q, x in of_data.items()} for data, of_data in values.items()}
    return summary | {"path": path}, means


def check_comparable(one: Row, other: Row) -> None:
    """Raises Fault unless two evaluations measure one thing on the same questions with the same gold answers."""
    paths, settings = f"{one['path']} and {other['path']}", (one["setting"], other["setting"])
    if one["metrics"][0] != other["metrics"][0] or settings[0]["task"] != settings[1]["task"]:
        measured = [f"{x['metrics'][0]} of {x['setting']['task']}" for x in (one, other)]
        raise Fault(f"--compare: {paths} measure {' and '.join(measured)}: compare evaluations of one task")
    questions = [setting["questions"] for setting in settings]  # set -> digest of its questions and gold answers
    unlike = [data for data in {**questions[0], **questions[1]} if questions[0].get(data) != questions[1].get(data)]
    if unlike:
        raise Fault(
            f"--compare: {paths} differ in the questions of {unlike[0]}, or in their gold answers: evaluate both with "
            "the same --data, --n and --seed"
        )


def differing(settings: Sequence[Row]) -> list[str]:
    """Names the settings in which evaluations differ, but for those that may."""
    return [key for key in settings[0] if key not in TOLD_APART and any(s[key] != settings[0][key] for s in settings)]


def compare(directories: Sequence[str]) -> str:
    """Returns a Markdown table of every arm against the first one, by set of questions and on average."""
    first, *others = map(read, directories)
    if not others:
        raise Fault("--compare: give two evaluations or more")
    summaries = [summary for arm in (first, *others) for summary in arm.summaries]
    for summary in summaries:
        check_comparable(summaries[0], summary)
    head = ["", "benchmark", "questions", label(summaries[0]["metrics"][0]), "difference over questions, 95 %", "p"]
    head += ["only this right, only that", "difference over seeds, 95 %", "p", "visible: questions, seeds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    headline: list[float] = []
    for arm in others:
        found: dict[str, Difference] = {}
        for data in first.seeds[0]:
            a, b = arm.mean(data), first.mean(data)
            x, y = np.array([a[q] for q in b]), np.array(list(b.values()))
            found[data] = paired(x, y)
            only = "{}, {}".format(*mcnemar(x, y)) if right_or_wrong(x, y) else ""
            lines.append(_row(arm, first, [data], data, found[data], only))
        whole = found[next(iter(found))]
        if len(found) > 1:
            whole = macro_difference(found)
            lines.append(_row(arm, first, list(found), "average", whole))
        seeds = between_seeds(arm.of_seeds(list(found)), first.of_seeds(list(found)))
        headline.append(whole.p if np.isnan(seeds.p) else seeds.p)
    out = [f"Differences from {first.name}.", "", *lines, ""]
    if len(others) > 1:
        adjusted = zip(others, holm(headline), strict=True)
        told = ", ".join(f"{arm.name} {_p(p) or 'no test'}" for arm, p in adjusted)
        out.append(f"Holm's p over the {len(others)} comparisons: {told}")
    if unlike := differing([summary["setting"] for summary in summaries]):
        out.append(f"Not all of these were made with the same {', '.join(unlike)}: summary.json has the values.")
    out.append(
        "Intervals over questions hold for these policies, those over seeds for other training runs. A test at 5 %\n"
        "finds a true difference called visible in 80 % of the cases; a smaller one cannot be told here. Where every\n"
        "question is right or wrong, p is that of McNemar's exact test."
    )
    return "\n".join(out)


def _row(arm: Arm, first: Arm, data: list[str], title: str, found: Difference, only: str = "") -> str:
    a, b = arm.of_seeds(data), first.of_seeds(data)
    seeds = between_seeds(a, b)
    tested = not np.isnan(seeds.p)
    level = [f"{seeds.interval:+}", _p(seeds.p)] if tested else ["", ""]
    visible = ", ".join(f"{d.visible:.3f}" for d in (found, seeds) if np.isfinite(d.visible))
    cells = [arm.name, title, f"{found.interval.n:,}", f"{over_seeds(a).mean:.3f}, {over_seeds(b).mean:.3f}"]
    cells += [f"{found.interval:+}", _p(found.p), only, *level, visible]
    return f"| {' | '.join(cells)} |"


def _p(p: float) -> str:
    return "" if np.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
