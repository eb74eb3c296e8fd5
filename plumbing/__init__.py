"""What every program of the project needs; importing any part of it makes a Ctrl-C end in one
line."""

from plumbing import stop  # noqa: F401
