"""Files of a run: written atomically, and read however they were cut short."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from plumbing.faults import DiskFault, Fault
from plumbing.outside import decoded

Row = dict[str, Any]  # of a .jsonl file


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the file system into a DiskFault with the name of the file."""
    try:
        yield
    except OSError as e:
        raise DiskFault(f"cannot write {path} ({e.strerror or e})") from None


def write_file(path: Path, text: str) -> None:
    """Writes a file atomically: a reader finds the old content or the new one. Raises DiskFault."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_text(text, "utf-8")
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink()  # or a full disk stays full


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory, which is called `path` in the end: a reader finds the old one,
    none or the new. Raises DiskFault."""
    path = path.absolute()
    temporary, old = (path.with_name(f".{path.name}{end}.tmp") for end in ("", ".old"))
    with writing(path):
        remove(old)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            with suppress(FileNotFoundError):
                os.replace(path, old)  # at once: removing it may take seconds
            os.replace(temporary, path)
            with suppress(DiskFault):  # the new one is there
                remove(old)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # or a full disk stays full


def remove(path: Path) -> None:
    """Removes a file or directory, if there is one; of a link only the link: what it points to is
    not the run's. Raises DiskFault."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def parse_lines(lines: Iterable[str], key: str = "") -> list[Row]:
    """Returns the objects of JSON lines, those with `key` if given; lines cut short or damaged are
    left out."""
    rows = []
    for line in lines:
        with suppress(ValueError):
            row = decoded(line)
            if isinstance(row, dict) and (not key or key in row):
                rows.append(row)
    return rows


def read_jsonl(path: Path) -> list[Row]:
    """Returns the rows of a .jsonl file, none of a file that is not there; Fault where it cannot be
    read."""
    try:
        return parse_lines(path.read_text("utf-8", "replace").split("\n"))
    except FileNotFoundError:
        return []
    except OSError as e:
        raise Fault(f"cannot read {path} ({e.strerror}): move it away") from None
