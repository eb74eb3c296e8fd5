"""What the measurements share: a run's policy in this process, its command, times, and processes that end."""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

import psutil  # noqa: E402

from config import Config, parse  # noqa: E402

ROOT = Path(__file__).parents[2]
BEST = (
    "Think in <think> </think>, search with <search> </search>, read <information> </information>, answer in <answer> "
    "</answer>. Search one entity at a time. State the fact found after each search. Answer with the exact name only. "
    "Keep searching until the last fact is found."
)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say whose steps are measured."""
    parser.add_argument("--model", default="world", help="a preset (world, smollm2-135m), or a folder with --preset")
    parser.add_argument("--preset", help="the preset whose other flags the model of a folder takes")
    parser.add_argument("--dtype", help="float32 or bfloat16; without it, as a run chooses")


def config_of(args: argparse.Namespace, **changes: Any) -> Config:
    """The preset's Config, changed; its learning rate is 0, so that all steps start from the same policy."""
    given = {name: getattr(args, name) for name in ("model", "preset", "dtype")}
    flags = [x for name, value in given.items() if value for x in (f"--{name}", value)]
    return parse(flags, mode="static", lr=0.0, **changes)


class Player:
    """A run's policy on the CPU, in the dtype that the run would choose; plays and learns from one batch of jobs."""

    def __init__(self, cfg: Config, instruction: str = BEST, server: str = ""):
        """`server`: the URL that is searched, if anything is."""
        from engines.choose import dtype_of
        from inspo import make_policy
        from tasks import Job
        from tasks.search_qa import SearchQA
        from training.ranks import Ranks

        self.cfg, self.task, self.dtype = cfg, SearchQA(cfg), dtype_of(cfg, "cpu")
        if server:
            self.task.connect(server)
        self.policy = make_policy(cfg, Ranks("cpu", cfg.patience, self.dtype), self.task)
        self.engine, self.tokenizer = self.policy.engine, self.policy.tokenizer
        questions = self.task.questions("train")[: cfg.batch]
        self.jobs = [Job(None, instruction, q, group) for group, q in enumerate(questions) for _ in range(cfg.G)]

    def rollout(self, t: int) -> list:
        return self.policy.rollout(t, "rollout", self.jobs)

    def update(self, t: int, taus: list) -> dict[str, float]:
        from tasks import reward

        reward(self.task, taus)
        self.policy.learner.set_advantages(taus)
        return self.policy.update(t, taus)

    def close(self) -> None:
        self.policy.close()


def write_instruction(folder: Path) -> Path:
    """Writes BEST to a file: under it the first policy scores, so there are gradients."""
    file = folder / "instruction.txt"
    file.write_text(BEST)
    return file


def train_command(out: Path, ranks: int, flags: Sequence[str]) -> list[str]:
    """Returns the command that starts a run in `out`, or resumes the one that is there."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] * (ranks > 1)
    resume = ["--resume"] * (out / "config.json").exists()
    return [sys.executable, *torchrun, "inspo.py", "--out", str(out), *flags, *resume]


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns a call's result, its seconds by the clock, and its CPU seconds, of all threads."""
    clock, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - clock, time.process_time() - cpu


def descendants(pid: int) -> list[psutil.Process]:
    """What a process has started, and what those have; nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill_tree(process: subprocess.Popen) -> None:
    """Kills a process and its descendants; a signal to its group would miss torchrun's ranks, which lead their own."""
    for each in descendants(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()
