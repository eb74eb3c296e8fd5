"""Copies of a run's numbers for a tracker; the run's directory has everything anyway."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plumbing.faults import first_line
from plumbing.files import Row


class Tracker:
    """What --tracker names, or "" for none. A resumed run goes on in the tracker's run that has its
    `id`. `note` is told once of a tracker that fails, without which the run goes on."""

    def __init__(self, name: str, path: Path, id: str, config: Row, note: Callable[[str], None]):
        self.name, self.note = name, note
        if name == "tensorboard":
            self.api: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
                path / name
            )
        elif name:
            # trackio has wandb's interface, but knows a run by its name
            self.api = importlib.import_module(name)
            which: Row = {"name": f"{path.name}-{id}"}
            if name == "wandb":
                which = {"name": path.name, "id": id, "dir": path}
            self.api.init(project="inspo", config=config, resume="allow", **which)

    def log(self, row: Mapping[str, float], t: int) -> None:
        """Logs the numbers of a row."""
        try:
            if self.name == "tensorboard":
                for name, x in row.items():
                    self.api.add_scalar(name, x, t)
            elif self.name:
                self.api.log(dict(row), step=t)
        except Exception as e:  # a lost network, a full disk, a process of its own that has died
            self.note(
                f"WARNING  --tracker {self.name} has failed ({type(e).__name__}: {first_line(e)}) and is told no more"
            )
            self.name = ""
