"""Faults that a user can fix. Libraries raise them; each program's `main` prints them as one
line."""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from plumbing.outside import printable


class Fault(Exception):
    """What is wrong, where, and what to do about it: a line, or a line for each of several
    faults."""

    def __str__(self) -> str:
        lines = [str(line) for line in self.args]
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} things are missing or wrong:")
        return "\n  ".join(lines)


def first_line(e: BaseException) -> str:
    """Returns the first line of an exception's message that says something, or the exception's
    type."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


def together(*checks: Callable[[], object]) -> None:
    """Runs every check and reports all failures at once."""
    lines: list[object] = []
    for check in checks:
        try:
            check()
        except Fault as e:
            lines += [line for line in e.args if line not in lines]
    if lines:
        raise Fault(*lines)


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


class Outlived(io.FileIO):
    """Standard output that its program may lose: once it cannot be written, one line on standard
    error, then nothing.

    The reader of a long run may end before it (`| head`, a killed `| tee log`), or the disk of its
    log may be full.
    """

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as e:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            with contextlib.suppress(OSError):
                print(
                    f"standard output cannot be written ({e.strerror}): continuing without it",
                    file=sys.stderr,
                )
            return len(content)


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
    named.

    The block goes on if standard output closes first, or cannot spell a character.
    """
    # None: closed (>&-)
    before = sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    if isinstance(before, io.TextIOWrapper) and before is sys.__stdout__:
        buffer = io.BufferedWriter(Outlived(1, "w", closefd=False))
        at_once = before.isatty() or before.write_through
        sys.stdout = io.TextIOWrapper(
            buffer, before.encoding, "backslashreplace", line_buffering=at_once
        )
    try:
        yield
    except Fault as e:
        text = printable(f"{program}: {e}" if program else str(e))
        tell_torchrun(text)
        sys.exit(text)
    finally:
        sys.stdout.flush()
        sys.stdout = before
