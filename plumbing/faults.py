"""Faults that a user can fix. Libraries raise them; each program's `main` prints them as one
line."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from plumbing.outside import printable


class Fault(Exception):
    """What is wrong, where, and what to do about it: a line."""


def first_line(e: BaseException) -> str:
    """Returns the first line of an exception's message that says something, or the exception's
    type."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


class Outage(Fault):
    """A part of a running system failed; a run that stops for it can be resumed."""


class EngineFault(Outage):
    """The engine does not answer, or it samples from a policy other than the one in training."""


class ToolDown(Outage):
    """A tool did not answer within all retries."""


class DiskFault(Outage):
    """A file of the run cannot be written: the disk is full, or it went away."""


class CheckpointFault(Fault):
    """A checkpoint cannot be loaded."""


class Diverged(Fault):
    """Training came to nothing; a run that is resumed would do so again."""


class OptimizerDown(Outage):
    """The LLM-based optimizer gave no usable reply; training continues without it."""


def tell_torchrun(text: str) -> None:
    """Has torchrun, which prints 30 lines of its own when a process fails, end them with this
    text."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"timestamp": str(int(time.time())), "py_callstack": text}
        with contextlib.suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": text, "extraInfo": about}}), "utf-8"
            )


@contextlib.contextmanager
def one_line(program: str = "") -> Iterator[None]:
    """Exits with code 1 and the fault's line on standard error, after `program: ` where one is
    named."""
    try:
        yield
    except Fault as e:
        text = printable(f"{program}: {e}" if program else str(e))
        tell_torchrun(text)
        sys.exit(text)
