"""A process and all that it started.

A signal to its group would miss torchrun's ranks, which lead sessions of their own.
"""

import contextlib
import subprocess

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """Returns what a process has started, and what those have; nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill_tree(process: subprocess.Popen) -> None:
    """Kills a process and its descendants, and waits for it."""
    for each in descendants(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()
