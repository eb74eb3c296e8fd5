"""A run's directory: its rows, its trajectories, and checkpoints at the end of a step.

A checkpoint is `step-N/`: weights and AdamW's moments as safetensors, one or more files for each
rank, and state.pt with all else. It is written beside training and gets its name once it is whole.
What a process did after it is done again: rows and files of later steps are dropped.
"""

from __future__ import annotations

import copy
import fcntl
import gzip
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
from torch.distributed.checkpoint.api import CheckpointException
from tqdm import tqdm

from config import Config, evolves, preset_of, program_of, read_config
from plumbing import stop
from plumbing.faults import CheckpointFault, DiskFault, Diverged, Fault
from plumbing.files import Row, commit, new_directory, read_jsonl, remove, write_file, writing
from plumbing.trust import remember_run
from population import Instruction, Population, ReplayBuffer
from training.policy import Policy, reason

LOGS = ("metrics", "population", "reflections")  # .jsonl
# What a resumed run may change: where and how fast it computes, not what.
CHANGEABLE = {
    "out", "resume", "device", "tracker", "retriever", "keep", "save_every", "engine", "vllm_memory",
    "recompute", "patience", "micro_tokens", "gather", "fused_layers",
    "threads",  # but with another number sums may be rounded differently
}  # fmt: skip


class Run:
    """`path/`: config.json, metrics.jsonl, population.jsonl, reflections.jsonl, trajectories/,
    checkpoints/."""

    def __init__(self, path: Path):
        self.path = path
        config = path / "config.json"
        self.config: Row = json.loads(config.read_bytes()) if config.is_file() else {}
        self.lock_file: IO[bytes] | None = None

    @classmethod
    def open(cls, cfg: Config) -> Run:
        """Creates or reopens the directory of a run and locks it until `close`.

        Raises Fault if it cannot be written to, if it belongs to another run, or if a process is
        writing to it.
        """
        if cfg.resume:
            read_config(Path(cfg.out), type(cfg), resume=True)
        with ExitStack() as stack, writing(Path(cfg.out or "runs")):
            now = time.strftime("%Y%m%d-%H%M%S")
            path = Path(cfg.out or f"runs/{now}-{preset_of(cfg.model)}-{cfg.mode}")
            path.mkdir(parents=True, exist_ok=True)
            if not cfg.resume and any(not file.name.startswith(".") for file in path.iterdir()):
                raise Fault(f"{path} is not empty: choose another --out, or --resume the run in it")
            run = cls(path)
            stack.callback(run.close)
            run.lock()

            # the run's settings: written now, or compared with those that are there
            settings = with_absolute_paths(cfg)
            if cfg.resume:
                run.check_settings(settings)
            else:
                about = {"program": program_of(type(cfg)), "commit": commit() or "unknown"}
                run.config = settings | about | {"id": secrets.token_hex(4)}
                run.write("config.json", json.dumps(run.config, indent=1))
                remember_run(path)
            for folder in ("checkpoints", "trajectories"):
                (path / folder).mkdir(exist_ok=True)
            stack.pop_all()
        return run

    def check_settings(self, settings: Row) -> None:
        """Raises Fault for a setting that computes something and is not the one that the run was
        started with."""
        for name in settings.keys() - CHANGEABLE:
            before, now = self.config.get(name, settings[name]), settings[name]
            if before != now:
                raise Fault(f"--resume: {self.path} was started with --{name} {before}, not {now}")

    def lock(self) -> None:
        """Raises Fault if another process is writing to this directory; the lock ends with the
        process."""
        self.lock_file = open(self.path / ".lock", "wb")
        try:
            # held by a process, not by what it forks
            fcntl.lockf(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Fault(
                f"another process writes to {self.path}: wait until it ends, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            pass

    def close(self) -> None:
        """Lets go of the lock."""
        if self.lock_file:
            self.lock_file.close()

    # ---- files and rows

    def write(self, name: str, text: str) -> None:
        """Writes a file atomically: a reader finds the old content or the new one."""
        write_file(self.path / name, text)

    def append(self, name: str, row: Row) -> None:
        """Appends a line to `name`.jsonl; raises DiskFault."""
        path = self.path / f"{name}.jsonl"
        with writing(path), open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")

    def rows(self, name: str) -> list[Row]:
        """Returns the rows of `name`.jsonl; a line that a kill has cut short is none."""
        return read_jsonl(self.path / f"{name}.jsonl")

    def write_trajectories(self, name: str, rows: list[Row]) -> None:
        """Writes trajectories/`name`.jsonl.gz, unless there are none."""
        path = self.path / "trajectories" / f"{name}.jsonl.gz"
        if rows:
            with writing(path), gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as f:
                f.writelines(json.dumps(row) + "\n" for row in rows)

    def drop_after(self, t: int) -> None:
        """Drops rows and trajectories of the steps after t, which are played again."""
        for name in LOGS:
            kept = [row for row in self.rows(name) if row["t"] <= t]
            self.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        for path in (self.path / "trajectories").iterdir():
            step = re.match(r"(?:step|verify)-(\d+)", path.name)
            if step and int(step[1]) > t:
                remove(path)

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
        means = {row["t"]: row[name] for row in rows if name in row}
        evaluated = [path for path in self.checkpoints() if step_of(path) in means]
        return max(evaluated, key=lambda path: means[step_of(path)], default=None)  # CHOICE-25


@contextmanager
def open_run(cfg: Config) -> Iterator[Run]:
    """Yields the directory of a run; what ends a run that can be resumed becomes a Fault that says
    how.

    An error in a user's code is raised as it is, for its traceback, after a line that says how.
    """
    run = Run.open(cfg)
    try:
        yield run
    except BaseException as e:  # a notebook's KeyboardInterrupt, too
        if not cfg.resume and not run.rows("metrics"):
            shutil.rmtree(run.path, ignore_errors=True)  # it has measured nothing
            raise
        if isinstance(e, (CheckpointFault, Diverged)):
            raise
        saved = run.checkpoints()
        where = f"step {step_of(saved[-1])}" if saved else "the start"
        how = f"resume from {where} with --out {run.path} --resume"
        if isinstance(e, (Fault, stop.Stopped)):
            raise Fault(f"\n{e}\n{how}") from None
        print(f"\n{how}", file=sys.stderr)
        raise
    finally:
        run.close()


class Checkpoints:
    """Saves and restores what a resumed run needs: the policy, the population P, the replay buffer
    B."""

    def __init__(self, cfg: Config, run: Run, policy: Policy, P: Population, B: ReplayBuffer):
        self.cfg, self.run, self.policy, self.P, self.B = cfg, run, policy, P, B
        self.state = self.saved = Row()  # at the end of the last step; in the newest checkpoint
        self.saving: Future[None] | None = None  # of the newest checkpoint

    def restore(self) -> int:
        """Restores a run that is resumed from its newest checkpoint; returns the step to play, 1
        of a new run."""
        run = self.run
        for left in (run.path / "checkpoints").glob(".*.tmp"):  # of a process that was killed
            remove(left)
        found = run.checkpoints()
        if not found:  # none yet: the run begins anew
            run.drop_after(-1)
            return 1
        state = read_state(found[-1])
        run.drop_after(state["t"])
        self.P.load_state_dict(state["population"])
        self.B.load_state_dict(state["buffer"])
        self.policy.learner.remembered = state["memory"]
        self.policy.load(found[-1].absolute(), state["t"])
        self.state = self.saved = state
        tqdm.write(f"resumed after step {state['t']}")  # above a bar
        return int(state["t"]) + 1

    def end_step(self, t: int, evaluated: bool = False) -> None:
        """Keeps the state at the end of step t, and saves it every --save_every steps, where it
        was evaluated, before a step that evolves, and in the end.

        Raises the DiskFault of a checkpoint that could not be written.
        """
        if self.saving and self.saving.done():
            self.wait()
        state = {
            "t": t,
            "population": self.P.state_dict(),
            "memory": self.policy.learner.remembered,
        }
        self.state = copy.deepcopy(state) | {"buffer": self.B.state_dict()}
        cfg = self.cfg
        # step t + 1 will evolve (L16), after its update: a stop there could save nothing
        evolving = (t + 1) % cfg.K_e == 0 and t + 1 < cfg.T_e and evolves(cfg)
        if evaluated or evolving or (t and t % cfg.save_every == 0) or t == cfg.T:
            self.save()

    def save(self) -> None:
        """Begins to write the state at the end of the last step, unless it is on disk or an update
        has begun since.

        A thread goes on with it: `wait` waits. Until then a kill leaves the checkpoint before.
        Nothing is saved once the ranks have lost contact.
        """
        state, policy = self.state, self.policy
        if state is self.saved or state["t"] != policy.t or not policy.ranks_ready:
            return
        self.wait()
        path = self.run.path.absolute() / "checkpoints" / f"step-{state['t']:06d}"
        new = path.with_name(f".{path.name}.tmp")
        with writing(new):
            remove(new)
            new.mkdir()
        policy.save(new)
        thread = ThreadPoolExecutor(1)
        self.saving = thread.submit(self._complete, policy.written, new, path, state)
        thread.shutdown(wait=False)  # it ends when that is done
        self.saved = state

    def _complete(self, written: Future[None], new: Path, path: Path, state: Row) -> None:
        """Adds the state to weights that have been written, and removes the checkpoints that this
        one replaces."""
        try:
            written.result()
            torch.save(state | {"files": count_files(new)}, new / "state.pt")
            os.replace(new, path)
        except (CheckpointException, OSError, RuntimeError) as e:  # torch.save's on a full disk
            shutil.rmtree(new, ignore_errors=True)  # or a full disk stays full
            raise DiskFault(f"cannot write {path} ({reason(e)})") from None
        best = self.run.best()
        for old in self.run.checkpoints()[: -self.cfg.keep]:
            if old != best:
                # fails on NFS while somebody reads it: the next save tries again
                with suppress(DiskFault):
                    remove(old)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is there; raises the DiskFault that
        prevented it."""
        saving, self.saving = self.saving, None
        if saving:
            saving.result()

    @contextmanager
    def save_on_failure(self) -> Iterator[None]:
        """Saves the state at the end of the last step where a run is stopped inside, or fails, and
        waits until it is written."""
        try:
            yield
        except BaseException as e:
            with suppress(Exception):  # what ended the run comes first
                if not isinstance(e, DiskFault):  # a checkpoint would not fit either
                    self.save()
                self.wait()
            raise

    def export(self, I_star: Instruction) -> None:
        """Writes the result of a run: I_star.txt, and the policy as a plain Hugging Face
        directory."""
        self.wait()
        self.run.write("I_star.txt", I_star.text + "\n")
        with new_directory(self.run.path / "policy") as path:
            self.policy.export(path)


def read_state(checkpoint: Path) -> Row:
    """Returns what state.pt of a checkpoint holds; raises CheckpointFault where it cannot be read,
    or where a file of weights is missing, which torch would not notice."""
    try:
        state: Row = torch.load(checkpoint / "state.pt", weights_only=True)
        files = state["files"]
    except Exception as e:
        raise CheckpointFault(f"{checkpoint} cannot be read ({reason(e)})") from None
    if count_files(checkpoint) != files:
        raise CheckpointFault(f"{checkpoint} lacks some of its {files} files of weights")
    return state


def count_files(checkpoint: Path) -> int:
    """Returns how many files of weights a checkpoint has."""
    return len(list(checkpoint.glob("*.safetensors")))


def step_of(checkpoint: Path) -> int:
    """Returns the step of a checkpoint, from its name."""
    return int(checkpoint.name.split("-")[1])


def with_absolute_paths(cfg: Config) -> Row:
    """Returns the knobs for config.json, which is read from other directories too."""
    knobs = asdict(cfg)
    for name in ("train", "valid", "test", "corpus", "instruction", "model"):
        if knobs[name] and Path(knobs[name]).exists():
            knobs[name] = str(Path(knobs[name]).absolute())
    return knobs
