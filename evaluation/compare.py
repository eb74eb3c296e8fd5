"""Two evaluations or more side by side: paired differences, McNemar's test, seeds as a second level, power."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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

Means = dict[str, dict[str, float]]  # set of questions -> question -> the task's first metric, mean over its samples


class Arm(NamedTuple):
    """What is compared: one evaluation, or one for each seed of a method."""

    name: str
    metric: str
    seeds: list[Means]
    samples: int

    def mean(self, data: str) -> dict[str, float]:
        """Returns each question's mean over the seeds."""
        return {q: float(np.mean([seed[data][q] for seed in self.seeds])) for q in self.seeds[0][data]}

    def of_seeds(self, data: Sequence[str]) -> list[float]:
        """Returns each seed's mean, averaged over the sets."""
        return [float(np.mean([np.mean(list(seed[d].values())) for d in data])) for seed in self.seeds]


def read(directories: str) -> Arm:
    """Returns the arm of some evaluations, separated by commas; Fault where one is missing or unlike the others."""
    paths, seeds, samples = [Path(name) for name in directories.split(",")], list[Means](), 1
    metric = metric_of(paths[0])
    for path in paths:
        rows = read_jsonl(path / "results.jsonl")
        if not rows:
            raise Fault(f"--compare {path}: no results.jsonl with a question in it; evaluate.py writes one")
        same_metric(paths[0], metric, path, metric_of(path))
        values: dict[str, dict[str, list[float]]] = {}
        try:
            for row in rows:
                values.setdefault(row["data"], {}).setdefault(row["id"], []).append(float(row[metric]))
        except (LookupError, TypeError, ValueError):
            raise Fault(f"--compare {path}: its results.jsonl is no evaluation's, or damaged") from None
        samples = max(len(x) for of_data in values.values() for x in of_data.values())
        seeds.append({d: {q: sum(x) / len(x) for q, x in of_data.items()} for d, of_data in values.items()})
        same_questions(paths[0], seeds[0], path, seeds[-1])
    names = [path.name for path in paths]
    return Arm(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more", metric, seeds, samples)


def metric_of(path: Path) -> str:
    """Returns the first metric of an evaluation."""
    try:
        return str(decoded((path / "summary.json").read_text())["metrics"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return "em"  # an evaluation by an earlier version, or by another program


def same_metric(path: Path, metric: str, other: Path, theirs: str) -> None:
    """Raises Fault unless two evaluations have one first metric."""
    if metric != theirs:
        raise Fault(f"--compare: {path} measures {metric} and {other} {theirs}: compare evaluations of one task")


def same_questions(path: Path, means: Means, other: Path, theirs: Means) -> None:
    """Raises Fault unless two evaluations asked the same questions."""
    for data in sorted({*means, *theirs}):
        if missing := sorted(set(means.get(data, {})) ^ set(theirs.get(data, {}))):
            raise Fault(
                f"--compare: {path} and {other} were not asked the same questions ({len(missing)} differ, as {data} "
                f"{missing[0]}); evaluate both with the same --data, --n and --seed"
            )


def compare(directories: Sequence[str]) -> str:
    """Returns a Markdown table of every arm against the first one, by set of questions and on average."""
    first, *others = map(read, directories)
    if not others:
        raise Fault("--compare: give two evaluations or more")
    head = ["", "benchmark", "questions", label(first.metric), "difference over questions, 95 %", "p"]
    head += ["only this right, only that", "difference over seeds, 95 %", "p", "visible: questions, seeds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    headline: list[float] = []
    for arm in others:
        same_metric(Path(first.name), first.metric, Path(arm.name), arm.metric)
        same_questions(Path(first.name), first.seeds[0], Path(arm.name), arm.seeds[0])
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
