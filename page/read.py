"""A run's directory as it is found: finished, running, cut short or written by an older version."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plumbing.faults import Fault
from plumbing.outside import decoded

Row = dict[str, Any]
WIDE = 8  # sources of questions at most that have a column, or a curve, of their own


@dataclass
class Run:
    """What a run has written so far. Anything may be empty; `missing` has a sentence for what ought to be there."""

    path: Path
    config: Row = field(default_factory=dict)
    steps: list[Row] = field(default_factory=list)  # of metrics.jsonl, by t: what the steps measured
    events: list[Row] = field(default_factory=list)  # of population.jsonl
    reflections: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)
    written: float = 0.0  # when a line was last written, seconds since 1970
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def T(self) -> int:
        """Steps that the run is to take; 0 if nothing says how many."""
        return int(number(self.config.get("T")) or number(self.summary.get("steps")) or 0)

    @property
    def t(self) -> int:
        """The last step in the log."""
        return int(self.steps[-1]["t"]) if self.steps else 0

    @property
    def metric(self) -> str:
        """The main metric of the run's task."""
        return self.metrics[0]

    @property
    def metrics(self) -> list[str]:
        """All metrics of the task, the main one first; exact match if nothing names any."""
        named = self.summary.get("metrics"), self._first.get("metrics"), [self.config.get("metric")], ["em"]
        return next(filter(None, map(_names, named)))

    @property
    def tools(self) -> list[str]:
        """The names under which calls of tools are counted, a trajectory."""
        if "tools" in self.summary:
            return _names(self.summary["tools"])
        if "metrics" in self._first:  # with them the first row has the scores at the start, and calls of tools
            scores = [name.removeprefix("test/") for name in self._first if name.startswith("test/")]
            return [name for name in scores if name not in self.metrics and "/" not in name]
        return [name for name in ("searches", "calculations") if any(name in row for row in self.steps)]

    @property
    def _first(self) -> Row:
        return self.steps[0] if self.steps else {}

    @property
    def held_out(self) -> dict[str, Row]:
        """The rows of the final table: means of the metrics by policy and instruction."""
        table = self.summary.get("held_out")
        rows = table.items() if isinstance(table, dict) else ()
        return {name: row for name, row in rows if isinstance(row, dict) and number(row.get(self.metric)) is not None}

    @property
    def finished(self) -> bool:
        return bool(self.summary)


def read_run(path: Path) -> Run:
    """Returns what a run's directory holds; Fault if it holds no run at all."""
    if not path.is_dir():
        raise Fault(f"{path}: no such directory; give a run's, runs/<name>")
    names = ("config.json", "metrics.jsonl", "population.jsonl")
    if not any((path / name).exists() for name in names):
        raise Fault(f"{path} holds no run: none of {', '.join(names)} is in it")
    run = Run(path)
    run.config = _object(run, "config.json", "the settings are unknown")
    metrics = _rows(run, "metrics.jsonl", "there are no curves")
    run.steps = list({row["t"]: row for row in metrics}.values())  # of a step that was written twice, the last
    run.steps.sort(key=lambda row: int(row["t"]))
    run.events = [row for row in _rows(run, "population.jsonl", "there is no family tree") if _is_event(row)]
    reflects = run.config.get("mode", "inspo") == "inspo" and run.t > 0  # others may do without
    run.reflections = _rows(run, "reflections.jsonl", "no call to the optimizer is known" if reflects else "")
    if (path / "summary.json").exists():
        run.summary = _object(run, "summary.json", "the final table is unknown")
    found = [path / name for name in ("metrics.jsonl", "population.jsonl", "summary.json", "config.json")]
    run.written = max(file.stat().st_mtime for file in found if file.exists())
    return run


def number(x: object) -> float | None:
    """Returns x if it is a finite number, else None."""
    return x if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) else None


def many(n: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def finite(x: Any) -> Any:
    """Returns x with None for every nan and infinity inside: JSON has no word for them, and browsers refuse them."""
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {str(k): finite(v) for k, v in x.items()}
    return [finite(v) for v in x] if isinstance(x, (list, tuple)) else x


def parse_lines(text: str) -> tuple[list[Row], int]:
    """Returns the objects of JSON lines, and how many lines hold none: cut short, or damaged."""
    out, bad = [], 0
    for line in filter(str.strip, text.splitlines()):
        try:
            row = decoded(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            out.append(row)
        else:
            bad += 1
    return out, bad


def _names(x: object) -> list[str]:
    return [name for name in x if isinstance(name, str) and name] if isinstance(x, list) else []


def _object(run: Run, name: str, without: str) -> Row:
    try:
        found = decoded((run.path / name).read_text())
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    run.missing.append(f"{name} is missing or unreadable: {without}.")
    return {}


def _rows(run: Run, name: str, without: str) -> list[Row]:
    """Returns the lines of a .jsonl file that name their step."""
    try:
        rows, bad = parse_lines((run.path / name).read_text(errors="replace"))
    except OSError:
        if without:
            run.missing.append(f"{name} is missing: {without}.")
        return []
    kept = [row for row in rows if number(row.get("t")) is not None]
    if bad := bad + len(rows) - len(kept):
        run.missing.append(
            f"{name}: {bad} {'line is' if bad == 1 else 'lines are'} cut short or damaged, and left out."
        )
    return kept


def _is_event(row: Row) -> bool:
    P = row.get("P")
    return isinstance(P, list) and all(isinstance(I, dict) and isinstance(I.get("id"), int) for I in P)
