"""Copies of a run's numbers and texts for a tracker; the run's directory has everything anyway."""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from plumbing.faults import Fault, first_line
from plumbing.files import Row


class Tracker:
    """What --tracker names, or "" for none. A resumed run goes on in the tracker's run that has its
    `id`. `note` is told once of a tracker that fails, without which the run goes on."""

    def __init__(
        self, name: str, path: Path, id: str, config: Row, note: Callable[[str], None] = print
    ):
        self.name, self.note = name, note
        try:
            if name == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                self.api: Any = partial(SummaryWriter, path / name)
                self.writer: Any = None
            elif name:
                # trackio has wandb's interface, but knows a run by its name
                self.api = importlib.import_module(name)
                which: Row = {"name": f"{path.name}-{id}"}
                if name == "wandb":
                    which = {"name": path.name, "id": id, "dir": path}
                self.api.init(project="inspo", config=config, resume="allow", **which)
        except Exception as e:  # no key, no network, no room
            raise Fault(
                f"--tracker {name} does not start ({first_line(e)}); mend that, or leave it out"
            ) from None

    def log(self, row: Row, t: int) -> None:
        """Logs the numbers and texts of a row."""
        try:
            self.send(row, t)
        except Exception as e:  # a lost network, a full disk, a process of its own that has died
            self.note(
                f"WARNING  --tracker {self.name} has failed ({type(e).__name__}: {first_line(e)}) and is told no more"
            )
            self.name = ""

    def send(self, row: Row, t: int) -> None:
        if self.name == "tensorboard":
            if self.writer is None:  # hides later steps of a process that was killed
                self.writer = self.api(purge_step=t)
            for name, x in row.items():
                add = self.writer.add_text if isinstance(x, str) else self.writer.add_scalar
                add(name, x, t)
        elif self.name:
            shown = dict(row)
            for name, x in row.items():
                if isinstance(x, str):
                    shown[name] = self.api.Table(columns=["step", "text"], data=[[t, x]])
            self.api.log(shown, step=t)
