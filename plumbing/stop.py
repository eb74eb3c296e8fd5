"""SIGINT, SIGTERM and SIGUSR1 ask the process to stop. Inside `may_stop` the request raises Stopped
at once; elsewhere it waits for the next `may_stop`, so that no update and no file is left half done.
A second signal ends the process."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

if not hasattr(os, "register_at_fork"):
    sys.exit("inspo runs on Linux and macOS; on Windows take WSL")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TWICE = 1.0  # seconds in which another signal counts as the first: torchrun doubles a Ctrl-C


def leads() -> bool:
    """Returns whether this process speaks for all of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


def count_ranks() -> int:
    """Returns how many processes torchrun has started, 1 without it."""
    if not os.environ.get("RANK"):  # a WORLD_SIZE alone is a cluster's
        return 1
    return int(os.environ.get("WORLD_SIZE") or 1)


class Stopped(SystemExit):
    """Somebody asked this process to stop. Uncaught, it prints its line on standard error and exits
    with code 1."""


class _State:
    request = ""  # the first signal
    since = 0.0  # when it came
    raises = False  # whether one raises Stopped at once


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Handles the signals, except those that the caller's shell ignores (nohup); afterwards the old
    handlers are back."""
    old = {}
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            old[number] = signal.signal(number, _request)
    try:
        yield
    finally:
        _State.request = ""
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def may_stop() -> Iterator[None]:
    """Lets a request raise Stopped inside, at once, and one that has waited on entry."""
    before, _State.raises = _State.raises, True
    try:
        raise_if_requested()
        yield
    finally:
        _State.raises = before


def raise_if_requested() -> None:
    """Raises Stopped if a signal has come."""
    if _State.request:
        raise Stopped(f"stopped by {_State.request}" if leads() else 1)


def requested() -> bool:
    return bool(_State.request)


def _request(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _State.request:
        _State.request, _State.since = signal.Signals(number).name, now
        if _State.raises:
            raise_if_requested()
        if leads():  # past a print that the signal may have interrupted
            os.write(
                2, f"\n{_State.request}: stopping once this update or file is complete\n".encode()
            )
    elif now > _State.since + TWICE:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _release() -> None:
    """Lets a fork, such as a reward's worker, be terminated whatever it is doing."""
    if signal.getsignal(signal.SIGTERM) is _request:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_release)
