"""Copies of a run's numbers, texts and trajectories for a tracker; the run's directory has everything anyway."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LABELS = ("instruction", "question", "group", "reward", "advantage", "prediction", "stop")  # of a trace


class Tracker:
    """What --tracker names, or "" for none. A resumed run goes on in the tracker's run that has its `id`."""

    def __init__(self, name: str, path: Path, id: str, config: dict[str, Any]):
        self.name = name
        if name == "tensorboard":
            self.api: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(path / name)
        elif name:
            self.api = importlib.import_module(name)  # trackio has wandb's interface, but knows a run by its name
            which = {"name": path.name, "id": id, "dir": path} if name == "wandb" else {"name": f"{path.name}-{id}"}
            self.api.init(project="inspo", config=config, resume="allow", **which)

    def log(self, row: Mapping[str, Any], t: int) -> None:
        """Logs numbers and texts."""
        if self.name == "tensorboard":
            for name, x in row.items():
                (self.api.add_text if isinstance(x, str) else self.api.add_scalar)(name, x, t)
        elif self.name:
            texts = {name: [[t, x]] for name, x in row.items() if isinstance(x, str)}
            tables = {name: self.api.Table(columns=["step", "text"], data=data) for name, data in texts.items()}
            self.api.log({**row, **tables}, step=t)

    def trajectories(self, rows: Sequence[Mapping[str, Any]], t: int) -> None:
        """Logs rows of trajectories/ as traces, which trackio alone has."""
        if self.name == "trackio":
            traces = [self.api.Trace(messages(row), {name: row[name] for name in LABELS}) for row in rows]
            self.api.log({"trajectories": traces}, step=t)


def messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns the question, and what each turn wrote and read, as a chat's messages."""
    turns = [[("assistant", turn["text"]), ("tool", "\n".join(turn["result"] or ()))] for turn in row["turns"]]
    chat = [("user", row["question_text"]), *sum(turns, [])]
    return [{"role": role, "content": content} for role, content in chat if content]
