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
)
from plumbing.faults import Fault
from journal.directory import read_jsonl

Scores = dict[str, dict[str, float]]  # benchmark -> question -> EM, the mean over its samples


class Arm(NamedTuple):
    """What is compared: one evaluation, or one for each seed of a method."""

    name: str
    seeds: list[Scores]
    samples: int

    def mean(self, data: str) -> dict[str, float]:
        """Returns each question's EM, the mean over the seeds."""
        return {q: float(np.mean([seed[data][q] for seed in self.seeds])) for q in self.seeds[0][data]}

    def of_seeds(self, data: Sequence[str]) -> list[float]:
        """Returns each seed's EM, averaged over the benchmarks."""
        return [float(np.mean([np.mean(list(seed[d].values())) for d in data])) for seed in self.seeds]


def read(directories: str) -> Arm:
    """Returns the arm of some evaluations, separated by commas; Fault where one is missing or unlike the others."""
    paths, seeds, samples = [Path(name) for name in directories.split(",")], [], 1
    for path in paths:
        rows = read_jsonl(path / "results.jsonl")
        if not rows:
            raise Fault(f"--compare {path}: no results.jsonl with a question in it; evaluate.py writes one")
        values: dict[str, dict[str, list[float]]] = {}
        for row in rows:
            values.setdefault(row["data"], {}).setdefault(row["id"], []).append(row["em"])
        samples = max(len(x) for of_data in values.values() for x in of_data.values())
        seeds.append({d: {q: sum(x) / len(x) for q, x in of_data.items()} for d, of_data in values.items()})
    names = [path.name for path in paths]
    arm = Arm(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more", seeds, samples)
    for path, seed in zip(paths, seeds, strict=True):
        same(paths[0], seeds[0], path, seed)
    return arm


def same(path: Path, scores: Scores, other: Path, theirs: Scores) -> None:
    """Raises Fault unless two evaluations asked the same questions."""
    for data in sorted({*scores, *theirs}):
        mine, others = scores.get(data, {}), theirs.get(data, {})
        if missing := sorted(set(mine) ^ set(others)):
            raise Fault(
                f"--compare: {path} and {other} were not asked the same questions ({len(missing)} differ, as {data} "
                f"{missing[0]}); evaluate both with the same --data, --n and --seed"
            )


def compare(directories: Sequence[str]) -> str:
    """Returns a Markdown table of every arm against the first one, by benchmark and on average."""
    first, *others = map(read, directories)
    if not others:
        raise Fault("--compare: give two evaluations or more")
    head = ["", "benchmark", "questions", "EM", "difference over questions, 95 %", "p", "only this right, only that; p"]
    head += ["difference over seeds, 95 %", "p", "visible: questions, seeds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    headline: list[float] = []
    for arm in others:
        same(Path(first.name), first.seeds[0], Path(arm.name), arm.seeds[0])
        found: dict[str, Difference] = {}
        for data in first.seeds[0]:
            a, b = arm.mean(data), first.mean(data)
            found[data] = paired([a[q] for q in b], list(b.values()))
            single = max(len(arm.seeds), len(first.seeds), arm.samples, first.samples) == 1
            exact = mcnemar([a[q] for q in b], list(b.values())) if single else None
            lines.append(_row(arm, first, [data], data, found[data], exact))
        whole = found[next(iter(found))]
        if len(found) > 1:
            whole = macro_difference(found)
            lines.append(_row(arm, first, list(found), "average", whole, None))
        seeds = between_seeds(arm.of_seeds(list(found)), first.of_seeds(list(found)))
        headline.append(whole.p if np.isnan(seeds.p) else seeds.p)
    out = [f"Differences from {first.name}.", "", *lines, ""]
    if len(others) > 1:
        adjusted = holm(headline)
        out.append(
            f"Holm's p over the {len(others)} comparisons: "
            + ", ".join(f"{arm.name} {_p(p)}" for arm, p in zip(others, adjusted, strict=True))
        )
    out.append(
        "Intervals over questions hold for these policies, those over seeds for other training runs. A test at 5 % "
        "finds a true difference called visible in 80 % of the cases; a smaller one cannot be told here."
    )
    return "\n".join(out)


def _row(
    arm: Arm, first: Arm, data: list[str], label: str, found: Difference, exact: tuple[int, int, float] | None
) -> str:
    a, b = arm.of_seeds(data), first.of_seeds(data)
    seeds = between_seeds(a, b)
    level = ["", "", ""]
    if np.isfinite(seeds.interval.low):
        level = [f"{seeds.interval:+}", _p(seeds.p), f", {seeds.visible:.3f}"]
    only = f"{exact[0]}, {exact[1]}; {_p(exact[2])}" if exact else ""
    cells = [arm.name, label, f"{found.interval.n:,}", f"{over_seeds(a).mean:.3f}, {over_seeds(b).mean:.3f}"]
    cells += [f"{found.interval:+}", _p(found.p), only, level[0], level[1], f"{found.visible:.3f}{level[2]}"]
    return f"| {' | '.join(cells)} |"


def _p(p: float) -> str:
    return "" if np.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
