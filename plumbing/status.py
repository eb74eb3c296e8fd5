"""What a run is doing before it has a progress bar: one line on a terminal, which the next one
overwrites."""

import sys

from plumbing.stop import leads


def status(text: str) -> None:
    """Shows `text` and " ...", or clears the line for ""; does nothing where standard error is no
    terminal."""
    if sys.stderr.isatty() and leads():
        sys.stderr.write(f"\r\x1b[K{text and text + ' ...'}")
        sys.stderr.flush()
