"""How fast the machine works: tokens a second and peak memory of each step, and a torch trace of one."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from journal.directory import writing
from tasks import Trajectory


def pace(taus: Sequence[Trajectory], seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns, by column, the tokens that all ranks sampled a second of the rollouts, those that they trained on (with
    prompts and observations) a second of the update, and rank 0's peak memory so far in GB (1e9 bytes): of its GPU, or
    of its process where there is none.

    The columns begin with time/, like all that a run does not repeat when it is resumed.
    """
    found = {"time/peak_gb": peak_gb()}
    for name, phase, tokens in (
        ("time/sampled_per_s", "rollout", sum(sum(tau.mask) for tau in taus)),
        ("time/trained_per_s", "update", sum(len(tau.ids) for tau in taus)),
    ):
        if seconds.get(phase):
            found[name] = tokens / seconds[phase]
    return found


def peak_gb() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated()) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class Trace:
    """Traces step `t` of a run, rollouts and update, on rank 0; 0: none."""

    def __init__(self, t: int, folder: Path):
        self.t, self.path = t, folder / f"trace-{t:06d}.json.gz"
        self.profiler: Any = None

    def begin(self, t: int) -> None:
        if t == self.t:
            self.profiler = torch.profiler.profile()
            self.profiler.start()

    def end(self) -> str:
        """Writes the trace if one was begun; returns a line that says where, or ""."""
        if self.profiler is None:
            return ""
        self.profiler.stop()
        with writing(self.path):
            self.profiler.export_chrome_trace(str(self.path))
        self.profiler = None
        return f"trace of step {self.t}: {self.path} (open it in ui.perfetto.dev)"
