"""Copies of a run's numbers and instructions for wandb or tensorboard; metrics.jsonl has everything anyway."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Tracker:
    """What --tracker names: "wandb", "tensorboard", or "" for none. A resumed run continues under its `id`."""

    def __init__(self, name: str, path: Path, id: str, config: dict[str, Any]):
        self.wandb: Any = None
        self.board: Any = None
        if name == "wandb":
            import wandb

            self.wandb = wandb
            wandb.init(project="inspo", name=path.name, dir=path, config=config, id=id, resume="allow")
        elif name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(path / "tensorboard")

    def numbers(self, values: Mapping[str, float], t: int) -> None:
        if self.wandb:
            self.wandb.log(dict(values), step=t)
        for name, value in values.items() if self.board else ():
            self.board.add_scalar(name, value, t)

    def text(self, name: str, text: str, t: int) -> None:
        if self.wandb:
            self.wandb.log({name: self.wandb.Table(columns=["step", "text"], data=[[t, text]])}, step=t)
        if self.board:
            self.board.add_text(name, text, t)
