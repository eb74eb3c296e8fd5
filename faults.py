"""Faults that a person can mend. Libraries raise them; each program's `main` prints them as one line."""

import contextlib
import sys
from collections.abc import Iterator

from outside import printable


class Fault(Exception):
    """What is wrong, where, and what to do about it, in one line."""


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


class OptimizerDown(Outage):
    """The LLM-based optimizer gave no usable reply; training continues without it."""


@contextlib.contextmanager
def one_line(program: str = "") -> Iterator[None]:
    """Exit with code 1 and the fault's line on standard error, after `program: ` where one is named."""
    try:
        yield
    except Fault as e:
        sys.exit(printable(f"{program}: {e}" if program else str(e)))
