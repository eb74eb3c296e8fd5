"""A run's directory: what is written there, atomically, and what a resumed run finds in it."""

from __future__ import annotations

import fcntl
import gzip
import itertools
import json
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch

from config import Config, holds_a_run, preset_of, program_of, read_config
from plumbing import checkpoint, stop
from plumbing.faults import CheckpointFault, DiskFault, Diverged, Fault
from plumbing.files import Row, read_jsonl, remove, write_file, writing
from plumbing.outside import decoded
from plumbing.trust import remember_run
from plumbing.versions import commit

LOGS = ("metrics", "population", "reflections")  # .jsonl
# What a resumed run may change: where and how fast it computes, not what.
CHANGEABLE = {
    "out", "resume", "device", "tracker", "retriever", "keep", "save_every",
    "engine", "vllm", "vllm_memory", "recompute", "patience", "micro_tokens",
    "gather", "fused_layers",
    "threads",  # but with another number sums may be rounded differently
}  # fmt: skip
# What a run writes. Where one of these is there before it begins, it is somebody's: a Fault.
OWN = (
    "checkpoints", "trajectories", "policy", "metrics.jsonl", "population.jsonl", "reflections.jsonl", "I_star.txt",
    "summary.json", "report.html", "servers.log",
)  # fmt: skip


class RunDirectory:
    """`path/` with config.json, metrics.jsonl, population.jsonl, reflections.jsonl, trajectories/,
    checkpoints/."""

    def __init__(self, path: Path):
        self.path = path
        self.others: set[Path] = set()  # what was there before the run
        config = path / "config.json"
        self.record: Row = decoded(config.read_bytes()) if config.is_file() else {}
        self.written: Counter[str] = Counter()  # rows of each log
        self.id = self.record.get("id", "")  # that its checkpoints have too
        self._lock: IO[bytes] | None = None

    @classmethod
    @contextmanager
    def opened(cls, cfg: Config) -> Iterator[RunDirectory]:
        """Yields the directory of a run; what ends a run that can be resumed becomes a Fault that
        says how.

        An error in a user's code is raised as it is, for its traceback, after a line that says how.
        """
        run = cls.open(cfg)
        try:
            yield run
        except BaseException as e:  # a notebook's KeyboardInterrupt, too
            # a run that measured and paid for nothing leaves nothing
            empty = not (cfg.resume or run.rows("metrics") or run.rows("reflections"))
            if empty:
                run.discard()
            if empty or isinstance(e, (CheckpointFault, Diverged)):
                raise

            # any other can be resumed: from where?
            saved = run.checkpoints()
            where = f"step {step_of(saved[-1])}" if saved else "the start"
            how = f"resume from {where} with --out {run.path} --resume"
            if isinstance(e, DiskFault):
                how = f"make room and {how}"
            if isinstance(e, (Fault, stop.Stopped)):
                raise Fault(f"\n{e}\n{how}") from None
            print(f"\n{how}", file=sys.stderr)
            raise
        finally:
            run.close()

    @classmethod
    def open(cls, cfg: Config) -> RunDirectory:
        """Creates or reopens the directory of a run and locks it until `close`.

        Raises Fault if it cannot be written to, if it belongs to another run, or if a process is
        writing to it.
        """
        if cfg.resume:
            read_config(Path(cfg.out), type(cfg), resume=True)
        # a directory without anybody's files, locked
        run = cls(Path(cfg.out or "runs"))
        with ExitStack() as stack, writing(run.path):
            stack.callback(run.close)
            if not cfg.out:
                now, name = time.strftime("%Y%m%d-%H%M%S"), preset_of(cfg.model)
                run.path = _unused(f"runs/{now}-{name}-{cfg.mode}")
            path = run.path
            path.mkdir(parents=True, exist_ok=True)
            run.others = set(path.iterdir())
            foreign = [name for name in OWN if path / name in run.others]
            if foreign and not run.record:
                raise Fault(
                    f"{path} has {foreign[0]!r}, which a run would replace: choose another --out"
                )
            run.lock()

            # the run's record: written now, or compared with the one that is there
            record = with_absolute_paths(cfg) | {
                "program": program_of(type(cfg)),
                "commit": commit() or "unknown",
            }
            if cfg.resume:
                run.compare(record)
            elif (path / "config.json").exists():
                raise Fault(holds_a_run(str(path)))
            else:
                run.id = secrets.token_hex(4)
                run.write("config.json", json.dumps(record | {"id": run.id}, indent=1))
                remember_run(path)

            # the folders that a run fills
            for folder in ("checkpoints", "trajectories"):
                with writing(path / folder):
                    (path / folder).mkdir(exist_ok=True)
            for left in (path / "checkpoints").glob(".*.tmp"):  # of a process that was killed
                remove(left)
            stack.pop_all()
        return run

    def compare(self, record: Row) -> None:
        """Raises Fault for a setting that computes something and is not the one that the run was
        started with."""
        for name in record.keys() - CHANGEABLE - {"commit"}:
            before = self.record.get(name, record[name])
            if before != record[name]:
                raise Fault(
                    f"--resume: {self.path} was started with --{name} {before}, not {record[name]}"
                )

    def lock(self) -> None:
        """Raises Fault if another process is writing to this directory; the lock ends with the
        process."""
        self._lock = open(self.path / ".lock", "wb")
        try:
            # held by a process, not by what it forks
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Fault(
                f"another process writes to {self.path}: wait until it ends, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            pass

    def discard(self) -> None:
        """Removes what the run has written, and the directory if nothing else is in it."""
        for path in set(self.path.iterdir()) - self.others:
            remove(path)
        with suppress(OSError):
            self.path.rmdir()

    def close(self) -> None:
        """Lets go of the lock."""
        if self._lock:
            self._lock.close()

    # ---- files and rows

    def write(self, name: str, text: str) -> None:
        """Writes a file atomically: a reader finds the old content or the new one."""
        write_file(self.path / name, text)

    def append(self, name: str, row: Row) -> None:
        """Appends a line to `name`.jsonl; raises DiskFault."""
        path = self.path / f"{name}.jsonl"
        with writing(path), open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
        self.written[name] += 1

    def rows(self, name: str) -> list[Row]:
        """Returns the rows of `name`.jsonl that are of a run: those with a step."""
        return [row for row in read_jsonl(self.path / f"{name}.jsonl") if type(row.get("t")) is int]

    def write_trajectories(self, name: str, rows: list[Row]) -> None:
        """Writes trajectories/`name`.jsonl.gz, unless there are none."""
        path = self.path / "trajectories" / f"{name}.jsonl.gz"
        if rows:
            with writing(path), gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as f:
                f.writelines(json.dumps(row) + "\n" for row in rows)

    # ---- checkpoints

    def checkpoints(self) -> list[Path]:
        """Returns the complete checkpoints, oldest first; directories with other names do not
        count."""
        complete = []
        for path in (self.path / "checkpoints").glob("step-*"):
            if re.fullmatch(r"step-\d{6,}", path.name) and path.is_dir():
                complete.append(path)
        return sorted(complete, key=step_of)

    def best(self) -> Path | None:
        """Returns the checkpoint with the best mean of the task's first metric on the validation
        questions, if any."""
        rows = self.rows("metrics")
        name = next((f"valid/{row['metrics'][0]}" for row in rows if row.get("metrics")), "")
        means = {row["t"]: row[name] for row in rows if type(row.get(name)) is float}
        evaluated = [path for path in self.checkpoints() if step_of(path) in means]
        return max(evaluated, key=lambda path: means[step_of(path)], default=None)  # CHOICE-25

    def load_mark(self, path: Path) -> Row:
        """Returns the mark in a checkpoint; raises Fault if it cannot be read, or if it is another
        run's."""
        try:
            state: Row = torch.load(path / "state.pt", weights_only=True)
            whose = state["run"]
        except Exception as e:  # a damaged archive raises anything
            raise CheckpointFault(
                f"{path}/state.pt cannot be read ({checkpoint.reason(e)})"
            ) from None
        if whose != self.id:
            raise CheckpointFault(
                f"{path} is of the run {whose}, not of {self.id}, that of {self.path}: move it away"
            )
        return state

    def rewind(
        self,
        note: Callable[[str], None],
        find_damage: Callable[[Path], list[str]] = checkpoint.damage,
    ) -> tuple[Path, Row] | None:
        """Returns (checkpoint, its mark) to resume from and drops log lines after it; None if there
        is none.

        A checkpoint that is damaged is renamed, and `note` is told so; Fault if all are. Calls to
        the optimizer stay in reflections.jsonl: they have been paid for.
        """
        # the newest that is whole
        whole, damaged = None, dict[Path, str]()
        for path in reversed(self.checkpoints()):
            faults = find_damage(path.absolute())
            if not faults:
                whole = path
                break
            damaged[path] = faults[0]
        if damaged and not whole:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
            raise CheckpointFault(
                f"no checkpoint of {self.path} is whole ({reasons}): remove {self.path / 'checkpoints'} to start over"
                " there, or choose another --out without --resume"
            )
        # without one step 0 is written again
        mark: Row = self.load_mark(whole) if whole else {"t": -1, "ended": True}

        # only now is anything changed: damaged ones move aside, later rows go
        for path, reason in damaged.items():
            aside = path.with_name(f"damaged-{path.name}")
            with writing(aside):
                remove(aside)
                path.rename(aside)
            note(
                f"note: checkpoint {path.name} is damaged ({reason}) and is now called {aside.name}"
            )
        if not whole and self.rows("metrics"):
            note(f"note: {self.path} has no checkpoint: it starts over")
        for name in LOGS:
            rows, file = self.rows(name), self.path / f"{name}.jsonl"
            kept = [row for row in rows if is_before(row, mark) or "call" in row]
            # a kill may have cut the last line
            lines = file.read_bytes().count(b"\n") if file.exists() else 0
            lost = max(lines - len(rows), mark.get("rows", {}).get(name, 0) - len(kept))
            if lost > 0:
                note(f"note: {lost} lines of {file} are missing or damaged, and left out")
            self.write(file.name, "".join(json.dumps(row) + "\n" for row in kept))
            self.written[name] = len(kept)
        return (whole, mark) if whole else None


def with_absolute_paths(cfg: Config) -> Row:
    """Returns the knobs for config.json, which is read from other directories too."""
    knobs = asdict(cfg)
    for name in ("train", "valid", "test", "corpus", "instruction", "model"):
        if knobs[name] and Path(knobs[name]).exists():
            knobs[name] = str(Path(knobs[name]).absolute())
    return knobs


def is_before(row: Row, mark: Row) -> bool:
    """Returns whether a row was written before a mark. Of a mark's own step, unless it has ended,
    pruning alone was: evolution and evaluation are played again."""
    if row["t"] == mark["t"] and not mark["ended"]:
        return row.get("event") == "prune"
    return bool(row["t"] <= mark["t"])


def step_of(checkpoint: Path) -> int:
    """Returns the step of a checkpoint, from its name."""
    return int(checkpoint.name.split("-")[1])


def _unused(name: str) -> Path:
    """Creates and returns the directory `name`, or `name`-2, -3, ... if that is taken."""
    for k in itertools.count(1):
        path = Path(name if k == 1 else f"{name}-{k}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path
