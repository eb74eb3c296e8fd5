"""SIGINT, SIGTERM and SIGHUP are one request to stop; the first counts (under torchrun a Ctrl-C
arrives twice).

plumbing/__init__.py imports this module: a program of ours does so before anything slow. Until it
enters `listening` it has nothing to lose, and a request ends it at once, without an exception: one
that is raised while a C extension is imported may abort the process. From there on a request waits
for the next `may_stop`, and inside that it raises Stopped at once, so that no update and no file is
left half done. Python drops what is raised inside a `__del__`, of which a library's import has
thousands: there it is raised a moment later.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# a terminal, a cluster, a terminal that went away
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# at the top; a user's script there cleans up by itself
PROGRAMS = ("inspo.py", "ask.py", "evaluate.py", "export.py")


def leads() -> bool:
    """Returns whether this process speaks for all of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


def count_ranks() -> int:
    """Returns how many processes torchrun has started, 1 without it."""
    if not os.environ.get("RANK"):  # a WORLD_SIZE alone is a cluster's
        return 1
    return int(os.environ.get("WORLD_SIZE") or 1)


class Stopped(SystemExit):
    """Somebody asked this process to stop. Uncaught, it is its line on standard error and exit code
    1."""


class _State:
    request = ""  # the first signal
    raises = False  # whether one raises Stopped at once


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Handles the signals, but for those that the caller's shell ignores (nohup).

    A program ignores them afterwards: Python takes a second to exit. Elsewhere, as in tests, the
    old handlers return.
    """
    old = _handle_by(_request)
    try:
        yield
    finally:
        _State.request = ""
        for number, handler in old.items():
            signal.signal(number, signal.SIG_IGN if handler is EARLY else handler)


@contextlib.contextmanager
def may_stop() -> Iterator[None]:
    """Inside, a request raises Stopped at once, also one that has waited."""
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
    if not _State.request:
        _State.request = signal.Signals(number).name
        if _State.raises:
            _raise(number, frame)
        else:
            _print(f"\n{_State.request}: stopping as soon as this update or file is complete\n")


def _raise(number: int, frame: FrameType | None) -> None:
    """Raises Stopped in this frame, or a moment later if that is inside a `__del__`."""
    while frame:
        if frame.f_code.co_name == "__del__":
            signal.signal(signal.SIGALRM, _raise)
            # again and again: one alarm may come just before a wait, which it would not end
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            return
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, 0)
    if _State.raises:
        raise_if_requested()


def _exit(number: int, frame: FrameType | None) -> None:
    clear = "\r\x1b[K" if os.isatty(2) else ""  # the line that `status` shows
    _print(f"{clear}stopped by {signal.Signals(number).name}\n")
    os._exit(1)


def _print(text: str) -> None:
    """Writes to standard error, past a print that the signal may have interrupted; the terminal may
    be gone."""
    if leads():
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


def _handle_by(handler: Any) -> dict[signal.Signals, Any]:
    """Sets the handler of all signals that are not ignored; returns the handlers before."""
    old = {}
    for number in SIGNALS:
        before = signal.getsignal(number)
        if before is not signal.SIG_IGN:
            old[number] = signal.signal(number, handler)
    return old


def _release() -> None:
    """Lets a fork, such as a reward's worker, be terminated whatever it is doing."""
    if signal.getsignal(signal.SIGTERM) in (_request, EARLY):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_ours(program: str | None) -> bool:
    """Returns whether a program, None in a notebook, is one of PROGRAMS or in a package of this
    project. A bench starts others, and ends them by itself."""
    root = Path(__file__).resolve().parent.parent
    path = Path(program or "").resolve()
    if root not in path.parents or "bench" in str(path.relative_to(root)):
        return False
    folders = path.parents[: path.parents.index(root)]
    if not folders:
        return path.name in PROGRAMS
    return all((folder / "__init__.py").is_file() for folder in folders)


# What a request does before `listening`. A rank may wait for the others in C++, where no handler of
# Python's runs; it needs no line of its own, as torchrun prints some.
EARLY = signal.SIG_DFL if "RANK" in os.environ else _exit
if _is_ours(getattr(sys.modules["__main__"], "__file__", None)):
    _handle_by(EARLY)
os.register_at_fork(after_in_child=_release)
