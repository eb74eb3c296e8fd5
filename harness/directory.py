"""A run's directory: what is written there, atomically, and what a resumed run finds in it."""

import dataclasses
import gzip
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from config import Config
from faults import Fault

# Knobs that a resumed run may change: they affect where and how fast it runs, not what it computes.
FREE = {"out", "resume", "device", "tracker", "retriever", "keep", "save_every", "search_retries", "optimizer_retries"}
FREE |= {"engine", "vllm", "vllm_memory", "recompute", "offload_reference", "patience", "gpus", "card", "gpu_mem"}
FREE |= {"micro_tokens", "max_rows", "token_rows", "token_limit", "compare"}


class RunDirectory:
    """`out/` with config.json, metrics.jsonl, population.jsonl, reflections.jsonl, trajectories/, checkpoints/."""

    def __init__(self, cfg: Config, name: str):
        """Creates or reopens the directory; Fault if it cannot be written to or belongs to another run."""
        self.path = Path(cfg.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}-{cfg.mode}")
        self.keep = cfg.keep
        config = self.path / "config.json"
        self.created = not self.path.exists()
        if config.exists() and not cfg.resume:
            raise Fault(f"{self.path} holds a run already: continue it with --resume, or choose another --out")
        if cfg.resume and not config.exists():
            raise Fault(f"--resume: {self.path} holds no run; check --out")
        mine = dataclasses.asdict(cfg)
        if cfg.resume:
            theirs = {f.name: f.default for f in dataclasses.fields(Config)} | json.loads(config.read_text())
            if changed := [k for k in mine if k not in FREE and mine[k] != theirs.get(k)]:
                k = changed[0]
                raise Fault(f"--resume: {self.path} was started with --{k} {theirs.get(k)}, not {mine[k]}")
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (self.path / "trajectories").mkdir(exist_ok=True)
            if not config.exists():
                self.write("config.json", json.dumps(mine, indent=1))
            probe = self.path / ".probe"
            probe.touch()
            probe.unlink()
        except OSError as e:
            raise Fault(f"cannot write to {self.path} ({e.strerror}): choose another --out") from None

    def discard_if_empty(self) -> None:
        """Removes the directory of a run that failed before it measured anything."""
        if self.created and not self.rows("metrics"):
            shutil.rmtree(self.path, ignore_errors=True)

    def write(self, name: str, text: str) -> Path:
        """Writes a file atomically: a reader finds the old content or the new one."""
        path = self.path / name
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text)
        os.replace(temporary, path)
        return path

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Appends a line to `name`.jsonl."""
        with open(self.path / f"{name}.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Returns the lines of `name`.jsonl without one that a kill has cut short."""
        return read_jsonl(self.path / f"{name}.jsonl")

    def write_trajectories(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Writes trajectories/`name`.jsonl.gz."""
        path = self.path / "trajectories" / f"{name}.jsonl.gz"
        with gzip.open(path, "wt", compresslevel=1) as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)

    def checkpoint(self, t: int, save: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Writes all that step t+1 needs: what `save` puts into a directory, and `state` beside it."""
        path = self.path / "checkpoints" / f"step-{t:06d}"
        if path.exists():
            return
        temporary = path.with_name(f".{path.name}.tmp").absolute()
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save(temporary)
        torch.save(state | {"t": t}, temporary / "state.pt")
        os.replace(temporary, path)
        best = self.best()
        for old in self.checkpoints()[: -self.keep]:
            if old != best:
                shutil.rmtree(old)

    def checkpoints(self) -> list[Path]:
        """Returns the complete checkpoints, oldest first."""
        return sorted((self.path / "checkpoints").glob("step-*"))

    def best(self) -> Path | None:
        """Returns the checkpoint with the best score on the validation questions; None if no step was evaluated."""
        score = {f"step-{row['t']:06d}": row["valid/em"] for row in self.rows("metrics") if "valid/em" in row}
        return max((x for x in self.checkpoints() if x.name in score), key=lambda x: score[x.name], default=None)

    def rewind(self) -> tuple[Path, dict[str, Any]] | None:
        """Returns (checkpoint, its state) to resume from and drops log lines after it; None if there is none.

        Calls to the optimizer stay in reflections.jsonl: they have been paid for.
        """
        found = self.checkpoints()[-1:]
        state = torch.load(found[0] / "state.pt", weights_only=True) if found else {}
        t = state.get("t", -1)  # without a checkpoint the rows of step 0 are written again too
        for name in ("metrics", "population", "reflections"):
            kept = [row for row in self.rows(name) if row["t"] <= t or "call" in row]
            self.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        return (found[0], state) if found else None

    def how_to_resume(self) -> str:
        saved = self.checkpoints()
        where = f"step {int(saved[-1].name[5:])}" if saved else "the start"
        return f"resume from {where} with the same flags and --out {self.path} --resume"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a .jsonl file; no file has none, and a line cut short is left out."""
    out = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            out.append(json.loads(line))
        except ValueError:
            continue
    return out
