"""What a run is doing before it has a progress bar: one line on a terminal, which the next one overwrites."""

import os
import sys


def status(text: str) -> None:
    """Shows `text` and " ...", or clears the line for ""; does nothing where standard error is no terminal."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"\r\x1b[K{text and text + ' ...'}")
        sys.stderr.flush()
