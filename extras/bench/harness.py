"""What the measurements share: the command of a run, times, and processes that end."""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
BEST = (
    "Think in <think> </think>, search with <search> </search>, read <information> </information>, answer in <answer> "
    "</answer>. Search one entity at a time. State the fact found after each search. Answer with the exact name only. "
    "Keep searching until the last fact is found."
)


def parser_of(doc: str | None, program: str | None = None) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        program, description=doc, formatter_class=formatter, allow_abbrev=False
    )


def write_instruction(folder: Path) -> Path:
    """Writes BEST to a file: under it the first policy scores, so there are gradients."""
    file = folder / "instruction.txt"
    file.write_text(BEST, "utf-8")
    return file


def train_command(
    out: Path, ranks: int, flags: Sequence[str], program: str = "inspo.py"
) -> list[str]:
    """Returns the command that starts a run in `out`, or resumes the one that is there."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] * (
        ranks > 1
    )
    resume = ["--resume"] * (out / "config.json").exists()
    return [sys.executable, *torchrun, program, "--out", str(out), *flags, *resume]


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns a call's result and its seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def play_turns(
    engine: Any, contexts: dict[int, list[int]], max_new: int, temperature: float, seed: int = 0
) -> list[Any]:
    """Returns an engine's turn for each context, in the order of their keys."""
    engine.reset(seed)
    turns = list(engine.generate(contexts, max_new, temperature))
    while len(turns) < len(contexts):
        turns += engine.generate({}, max_new, temperature)
    return sorted(turns)


def descendants(pid: int) -> list[psutil.Process]:
    """What a process has started, and what those have; nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill_tree(process: subprocess.Popen) -> None:
    """Kills a process and its descendants; a signal to its group would miss torchrun's ranks, which
    lead their own."""
    for each in descendants(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()
