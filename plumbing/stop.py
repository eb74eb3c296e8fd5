"""SIGINT, SIGTERM and SIGHUP are one request to stop, which is granted where nothing is half done.

The first signal counts, later ones change nothing: under torchrun a Ctrl-C arrives twice. Inside `hold` a request
waits; inside `may_stop`, and before a run has begun, it raises Stopped at once. A program at the root, or in extras/,
imports this module first, which listens from there on: a Ctrl-C during the imports that follow ends in one line.
Python drops what is raised inside a `__del__` or a callback, and C extensions abort on it while they are imported: such
a request is made again once that has returned.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a terminal, a cluster, a terminal that went away


class Stopped(SystemExit):
    """Somebody asked this process to stop. Uncaught, it is its line on standard error and exit code 1."""


class _State:
    requested = ""  # name of the first signal
    dropped = False  # whether it was not raised, or Python has dropped what was raised
    granted = True  # whether a request raises at once
    over = False  # whether there is nothing left to stop


_state = _State()


def _on_signal(number: int, frame: FrameType | None) -> None:
    first = not _state.requested or _state.dropped
    _state.requested, _state.dropped = _state.requested or signal.Signals(number).name, False
    if not first or _state.over:
        return
    if _state.granted and _loading(frame):
        _send_again()
    elif _state.granted:
        check()
    elif os.environ.get("RANK", "0") == "0":  # not by print: the signal may have interrupted one
        text = f"\n{_state.requested}: the run stops and saves as soon as this update or file is complete\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


def _on_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Sends a request to stop again that was dropped, until it comes at a place from which it can be raised."""
    if isinstance(unraisable.exc_value, Stopped):
        _send_again()
    else:
        _hook_before(unraisable)


def _loading(frame: FrameType | None) -> bool:
    """Returns whether a C extension is being imported, which aborts, or wraps what is raised by Python code in it."""
    while frame and not isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
        frame = frame.f_back
    return frame is not None


def _send_again() -> None:
    _state.dropped = True
    threading.Timer(0.01, os.kill, (os.getpid(), signal.Signals[_state.requested])).start()


def requested() -> bool:
    """Returns whether a signal has come."""
    return bool(_state.requested)


def check() -> None:
    """Raises Stopped if a signal has come."""
    if _state.requested and not _state.over:
        speaks = os.environ.get("RANK", "0") == "0"  # under torchrun one process for all
        raise Stopped(f"stopped by {_state.requested}" if speaks else 1)


def listen() -> dict[signal.Signals, object]:
    """Handles the signals from now on, but for those that the caller's shell ignores (nohup); returns the old handlers.

    Call it in the main thread.
    """
    sys.unraisablehook = _on_unraisable
    old = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in old.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    return old  # type: ignore[return-value]


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Handles the signals inside, and restores the handlers from before.

    A program that got to its end ignores them instead: Python takes a second to exit, and its result is complete.
    """
    old = listen()
    ours = _on_signal in old.values()  # not so where several runs share one process, as in tests
    try:
        check()
        yield
        if ours:
            old = dict.fromkeys(old, signal.SIG_IGN)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if not ours:
            _state.requested, _state.over = "", False


def over() -> None:
    """Lets nobody stop what is left: all that was asked for is done, and its processes are being closed."""
    _state.over = True


@contextlib.contextmanager
def _granting(granted: bool) -> Iterator[None]:
    before, _state.granted = _state.granted, granted
    try:
        if granted:
            check()
        yield
    finally:
        _state.granted = before


def hold() -> contextlib.AbstractContextManager[None]:
    """Inside, a request to stop waits."""
    return _granting(False)


def may_stop() -> contextlib.AbstractContextManager[None]:
    """Inside, a request raises Stopped at once, also one that has waited."""
    return _granting(True)


_hook_before = sys.unraisablehook
_here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_program = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
if os.path.dirname(_program) in (_here, os.path.join(_here, "extras")):  # not under pytest
    listen()
