"""A run's directory as it is: finished, running, or cut short."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbing.faults import Fault
from plumbing.files import Row, parse_lines
from plumbing.outside import decoded


@dataclass
class Run:
    """What a run has written so far. Anything may be empty; `missing` has a sentence for what ought
    to be there."""

    path: Path
    config: Row
    steps: list[Row]  # of metrics.jsonl, by t: what the steps measured
    events: list[Row]  # of population.jsonl
    reflections: list[Row]
    summary: Row  # {} unless the run has finished
    written: float  # when a line was last written, seconds since 1970
    missing: list[str]

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
    names = ("config.json", "metrics.jsonl", "population.jsonl", "summary.json")
    files = [path / name for name in names if (path / name).exists()]
    if not files:
        raise Fault(f"{path} holds no run: none of {', '.join(names)} is in it")

    # what it has written; of a step that was written twice, the last
    missing = list[str]()
    config = _object(path / "config.json", missing)
    steps = {row["t"]: row for row in _rows(path / "metrics.jsonl", missing)}
    events = _rows(path / "population.jsonl", missing)
    calls, reflections = path / "reflections.jsonl", list[Row]()
    if calls.exists() or (config.get("mode", "inspo") == "inspo" and any(steps)):
        reflections = _rows(calls, missing)  # other modes may do without
    end = path / "summary.json"
    summary = _object(end, missing) if end.exists() else {}
    written = max(file.stat().st_mtime for file in files)
    in_order = [steps[t] for t in sorted(steps)]
    return Run(path, config, in_order, events, reflections, summary, written, missing)


def finite_number(x: Any) -> float | None:
    """x if it is a finite number, else None."""
    return x if isinstance(x, (int, float)) and math.isfinite(x) else None


def _object(file: Path, missing: list[str]) -> Row:
    try:
        return dict(decoded(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        missing.append(f"{file.name} is missing or cannot be read.")
        return {}


def _rows(file: Path, missing: list[str]) -> list[Row]:
    """The lines of a .jsonl file that name their step."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        missing.append(f"{file.name} is missing or cannot be read.")
        return []
    rows = [row for row in parse_lines(lines, "t") if type(row["t"]) is int]
    damaged = len(lines) - len(rows)
    if damaged:
        missing.append(f"{file.name}: {damaged} lines cut short or damaged, and left out.")
    return rows
