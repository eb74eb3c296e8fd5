"""Faults are a line."""

import pytest

from plumbing.faults import first_line


@pytest.mark.parametrize(
    "message, line",
    [
        # as transformers writes what is not installed
        ("\nX requires y.\nInstall it.", "X requires y."),
        (" \r\n\t\n  first\r\nsecond", "first"),
        ("one", "one"),
        ("\n \n", "ImportError"),
        ("", "ImportError"),
    ],
)
def test_the_first_line_of_an_exception_says_something(message, line):
    assert first_line(ImportError(message)) == line
