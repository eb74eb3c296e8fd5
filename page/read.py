"""A run's directory as it is: finished, running, or cut short."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from journal.summary import many
from plumbing.faults import Fault
from plumbing.files import Row, parse_lines
from plumbing.outside import decoded


@dataclass
class Run:
    """What a run has written so far. Anything may be empty; `missing` has a sentence for what ought
    to be there."""

    path: Path
    config: Row = field(default_factory=dict)
    # of metrics.jsonl, by t: what the steps measured
    steps: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)  # of population.jsonl
    reflections: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)  # {} unless the run has finished
    written: float = 0.0  # when a line was last written, seconds since 1970
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def T(self) -> int:
        """Steps that the run is to take; 0 if nothing says how many."""
        return int(self.config.get("T") or self.summary.get("steps", 0))

    @property
    def t(self) -> int:
        """The last step in the log."""
        return int(self.steps[-1]["t"]) if self.steps else 0

    @property
    def metrics(self) -> list[str]:
        """The task's metrics, the main one first."""
        return self._names("metrics") or ["em"]

    @property
    def tools(self) -> list[str]:
        """The names under which calls of tools are counted, a trajectory."""
        return self._names("tools")

    def _names(self, what: str) -> list[str]:
        """While it runs, metrics.jsonl has them beside the first scores."""
        named = [row[what] for row in [self.summary, *self.steps] if what in row]
        return [*named[0]] if named else []


def read_run(path: Path) -> Run:
    """Reads what is there; Fault if the directory holds no run at all."""
    if not path.is_dir():
        raise Fault(f"{path}: no such directory; give a run's, runs/<name>")

    # is there a run?
    run, names = Run(path), ("config.json", "metrics.jsonl", "population.jsonl", "summary.json")
    files = [path / name for name in names if (path / name).exists()]
    if not files:
        raise Fault(f"{path} holds no run: none of {', '.join(names)} is in it")

    # what it has written
    run.written = max(file.stat().st_mtime for file in files)
    run.config = _object(run, "config.json")
    steps = {row["t"]: row for row in _rows(run, "metrics.jsonl")}
    run.steps = [steps[t] for t in sorted(steps)]  # of a step that was written twice, the last
    run.events = _rows(run, "population.jsonl")
    calls = path / "reflections.jsonl"
    if calls.exists() or (run.config.get("mode", "inspo") == "inspo" and run.t > 0):
        run.reflections = _rows(run, calls.name)  # other modes may do without
    if (path / "summary.json").exists():
        run.summary = _object(run, "summary.json")
    return run


def finite_number(x: Any) -> float | None:
    """x if it is a finite number, else None."""
    return x if isinstance(x, (int, float)) and math.isfinite(x) else None


def _object(run: Run, name: str) -> Row:
    try:
        return dict(decoded((run.path / name).read_bytes()))
    except (OSError, ValueError, TypeError):
        run.missing.append(f"{name} is missing or cannot be read.")
        return {}


def _rows(run: Run, name: str) -> list[Row]:
    """The lines of a .jsonl file that name their step."""
    try:
        lines = (run.path / name).read_text("utf-8", "replace").splitlines()
    except OSError:
        run.missing.append(f"{name} is missing or cannot be read.")
        return []
    rows = [row for row in parse_lines(lines, "t") if type(row["t"]) is int]
    damaged = len(lines) - len(rows)
    if damaged:
        run.missing.append(f"{name}: {many(damaged, 'line')} cut short or damaged, and left out.")
    return rows
