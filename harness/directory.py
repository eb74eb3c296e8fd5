"""A run's directory: what is written there, atomically, and what a resumed run finds again."""

import dataclasses
import gzip
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from config import Config

# Knobs that may differ when a run is resumed: they change where and how fast, not what.
FREE = {"out", "resume", "device", "tracker", "retriever", "keep", "save_every", "search_retries", "optimizer_retries"}
FREE |= {"engine", "vllm", "vllm_memory", "recompute", "offload_reference", "patience", "gpus", "gpu_mem"}
FREE |= {"micro_tokens", "max_rows"}


class Run:
    """`out/` with config.json, metrics.jsonl, population.jsonl, reflections.jsonl, trajectories/, checkpoints/."""

    def __init__(self, cfg: Config, name: str):
        self.path = Path(cfg.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}-{cfg.mode}")
        self.keep = cfg.keep
        config = self.path / "config.json"
        self.created = not self.path.exists()
        if config.exists() and not cfg.resume:
            raise SystemExit(f"{self.path} holds a run already: go on with --resume, or choose another --out")
        if cfg.resume and not config.exists():
            raise SystemExit(f"--resume: {self.path} holds no run; check --out")
        mine = dataclasses.asdict(cfg)
        if cfg.resume:
            theirs = {f.name: f.default for f in dataclasses.fields(Config)} | json.loads(config.read_text())
            if other := [k for k in mine if k not in FREE and mine[k] != theirs.get(k)]:
                k = other[0]
                raise SystemExit(f"--resume: {self.path} has --{k} {theirs.get(k)}, now {mine[k]}: use the same")
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (self.path / "trajectories").mkdir(exist_ok=True)
            if not config.exists():
                self.write("config.json", json.dumps(mine, indent=1))
            probe = self.path / ".probe"
            probe.touch()
            probe.unlink()
        except OSError as e:
            raise SystemExit(f"cannot write to {self.path} ({e.strerror}): choose another --out") from None

    def discard_if_empty(self) -> None:
        """A run that failed before it measured anything leaves nothing behind."""
        if self.created and not self.rows("metrics"):
            shutil.rmtree(self.path, ignore_errors=True)

    def write(self, name: str, text: str) -> Path:
        """A whole file, which is there either as it was or as it is now."""
        path = self.path / name
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text)
        os.replace(temporary, path)
        return path

    def log(self, name: str, row: dict) -> None:
        """One line at the end of `name`.jsonl."""
        with open(self.path / f"{name}.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")

    def rows(self, name: str) -> list[dict]:
        """The lines of `name`.jsonl; one that a kill has cut is left out."""
        return read_jsonl(self.path / f"{name}.jsonl")

    def trajectories(self, t: int, rows: list[dict]) -> None:
        path = self.path / "trajectories" / f"step-{t:06d}.jsonl.gz"
        with gzip.open(path, "wt", compresslevel=1) as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)

    def checkpoint(self, t: int, save: Callable[[Path], None], state: dict) -> None:
        """Everything that step t+1 needs: what `save` writes into a directory, and `state` beside it."""
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
        """Whole checkpoints, oldest first."""
        return sorted((self.path / "checkpoints").glob("step-*"))

    def how_to_resume(self) -> str:
        saved = self.checkpoints()
        where = f"step {int(saved[-1].name[5:])}" if saved else "the start"
        return f"go on from {where} with: the same flags, --out {self.path} --resume"

    def best(self) -> Path | None:
        """The checkpoint with the best score on the held-out questions, where steps were evaluated."""
        score = {f"step-{row['t']:06d}": row["test/em"] for row in self.rows("metrics") if "test/em" in row}
        return max((x for x in self.checkpoints() if x.name in score), key=lambda x: score[x.name], default=None)

    def rewind(self) -> tuple[Path | None, dict]:
        """(checkpoint, its state) to resume from, (None, {}) if there is none; later log lines are dropped.

        Calls to the optimizer stay in reflections.jsonl: they have been paid for.
        """
        found = self.checkpoints()[-1:]
        state = torch.load(found[0] / "state.pt", weights_only=True) if found else {}
        t = state.get("t", -1)  # without a checkpoint even the rows of the start are written again
        for name in ("metrics", "population", "reflections"):
            kept = [row for row in self.rows(name) if row["t"] <= t or "call" in row]
            self.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        return (found[0] if found else None), state


@dataclass
class Ledger:
    """What the evolution costs beside the training (App. C)."""

    training_rollouts: int = 0
    verification_rollouts: int = 0
    optimizer_calls: int = 0
    optimizer_tokens: int = 0
    optimizer_seconds: float = 0.0
    searches: int = 0

    def overhead_inference(self) -> float:
        return self.verification_rollouts / max(1, self.training_rollouts)


def read_jsonl(path: Path) -> list[dict]:
    out = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            out.append(json.loads(line))
        except ValueError:
            continue
    return out


def tracker(name: str, path: Path, cfg: Config):
    """log(metrics, t) for wandb or tensorboard; for "" one that does nothing (metrics.jsonl has it all)."""
    if not name:
        return lambda metrics, t: None
    try:
        if name == "wandb":
            import wandb

            wandb.init(project="inspo", name=path.name, dir=path, config=dataclasses.asdict(cfg))
            return lambda metrics, t: wandb.log(metrics, step=t)
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(path / "tensorboard")
    except ImportError:
        raise SystemExit(f"--tracker {name}: not installed; pip install {name}, or leave it out") from None
    return lambda metrics, t: [writer.add_scalar(k, v, t) for k, v in metrics.items()] and None
