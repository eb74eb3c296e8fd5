"""Copies of a run's numbers and instructions for wandb or tensorboard; metrics.jsonl has everything anyway."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plumbing.faults import Fault


class Tracker:
    """Logs nothing: what `tracker` returns for ""."""

    def numbers(self, values: Mapping[str, float], t: int) -> None:
        """Logs the numbers of step t."""

    def text(self, name: str, text: str, t: int) -> None:
        """Logs a text of step t: instructions, as they were then."""


class Wandb(Tracker):
    """A run of wandb. Its id is kept in the run's directory, so that a resumed run continues there."""

    def __init__(self, path: Path, config: dict[str, Any]):
        import wandb

        kept = path / "wandb_id.txt"
        if not kept.exists():
            kept.write_text(wandb.util.generate_id())
        self.wandb, id = wandb, kept.read_text().strip()
        wandb.init(project="inspo", name=path.name, dir=path, config=config, id=id, resume="allow")

    def numbers(self, values: Mapping[str, float], t: int) -> None:
        self.wandb.log(dict(values), step=t)

    def text(self, name: str, text: str, t: int) -> None:
        table = self.wandb.Table(columns=["step", "text"], data=[[t, text]])
        self.wandb.log({name: table}, step=t)


class Tensorboard(Tracker):
    def __init__(self, path: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(path / "tensorboard")

    def numbers(self, values: Mapping[str, float], t: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, t)

    def text(self, name: str, text: str, t: int) -> None:
        self.writer.add_text(name, text, t)


def tracker(name: str, path: Path, config: dict[str, Any]) -> Tracker:
    """Returns the tracker that --tracker names."""
    try:
        return Wandb(path, config) if name == "wandb" else Tensorboard(path) if name else Tracker()
    except ImportError as e:
        raise Fault(f"--tracker {name}: cannot be imported ({e}); mend it, or leave it out") from None
