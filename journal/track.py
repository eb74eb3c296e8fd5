"""Copies of a run's numbers, texts and trajectories for a tracker; the run's directory has
everything anyway."""

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tasks import Trajectory


class Tracker:
    """What --tracker names, or "" for none. A resumed run goes on in the tracker's run that has its
    `id`."""

    def __init__(self, name: str, path: Path, id: str, config: dict[str, Any]):
        self.name = name
        if name == "tensorboard":
            self.api: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
                path / name
            )
        elif name:
            # trackio has wandb's interface, but knows a run by its name
            self.api = importlib.import_module(name)
            which = (
                {"name": path.name, "id": id, "dir": path}
                if name == "wandb"
                else {"name": f"{path.name}-{id}"}
            )
            self.api.init(project="inspo", config=config, resume="allow", **which)

    def log(self, row: Mapping[str, Any], t: int) -> None:
        """Logs numbers and texts."""
        for name, x in row.items() if self.name == "tensorboard" else ():
            (self.api.add_text if isinstance(x, str) else self.api.add_scalar)(name, x, t)
        if self.name in ("wandb", "trackio"):
            texts = {name: [[t, x]] for name, x in row.items() if isinstance(x, str)}
            tables = {
                name: self.api.Table(columns=["step", "text"], data=data)
                for name, data in texts.items()
            }
            self.api.log({**row, **tables}, step=t)

    def trajectories(self, taus: Iterable[Trajectory], t: int) -> None:
        """Logs those whose tokens the update watched as traces, which trackio alone has."""
        for tau in taus if self.name == "trackio" else ():
            if tau.tokens:
                chat = {"user": tau.question.text, "assistant": tau.response}
                trace = self.api.Trace(
                    [{"role": k, "content": text} for k, text in chat.items()], tau.record()
                )
                self.api.log({"trajectory": trace}, step=t)
