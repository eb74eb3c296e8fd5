"""What a run's config.json may start: only what this user has started here before, or names again
on the command line.

A run directory may come from anybody. Its weights are safetensors and its logs are text, but
`--task`, `--tools`, `--reward`, `--format`, `--parts` and `--engine` name modules and commands, and
`--retriever` names a server that would be sent prompts. Runs started by this user are
remembered by the digest of their config.json, which has a random id.
"""

import hashlib
import os
import shlex
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from plumbing.faults import Fault
from plumbing.outside import printable

ROOT = Path(__file__).parent.parent
KNOBS = ("task", "tools", "reward", "format", "parts", "retriever", "engine")


def is_ours(knob: str, value: str) -> bool:
    """Whether a value is a plain word, such as `search`, or the module:Class of a task or format in
    tasks/."""
    ours = knob in ("task", "format") and value.startswith("tasks.")
    return ours or ":" not in value


def check_origin(run: Path, settings: Mapping[str, Any], given: Container[str]) -> None:
    """Raises Fault if the settings in a run's config.json name code or servers that this user has
    not chosen.

    `settings`: those that the program uses. `given`: names of the flags on the command line, which
    replace them.
    """
    foreign = []
    for name in KNOBS:
        value = str(settings.get(name, ""))
        if name not in given and not all(is_ours(name, part) for part in value.split(",")):
            foreign.append(f"--{name} {shlex.quote(value)}")
    if foreign and not _remembers(run):
        flags = printable(" ".join(foreign))
        raise Fault(
            f"{run} was not started by you on this machine, and its config.json names code or servers; if you trust"
            f" them, give them again: {flags}"
        )


def remember_run(run: Path) -> None:
    """Notes that this user has started the run; without a home directory to write to nothing is
    remembered."""
    with suppress(OSError, RuntimeError):
        _ledger().parent.mkdir(parents=True, exist_ok=True)
        with open(_ledger(), "a", encoding="utf-8") as file:
            file.write(f"{_digest(run)}\n")


def _remembers(run: Path) -> bool:
    try:
        return _digest(run) in _ledger().read_text("utf-8").split()
    except (OSError, RuntimeError):
        return False


def _digest(run: Path) -> str:
    return hashlib.sha256((run / "config.json").read_bytes()).hexdigest()


def _ledger() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "inspo" / "started"
