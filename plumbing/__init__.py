"""What every program of the project needs; whichever imports a part of it first has a Ctrl-C in one line."""

from plumbing import stop  # noqa: F401
