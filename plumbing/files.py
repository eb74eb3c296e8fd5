"""Files of a run: written atomically, and read however they were cut short; and by which code."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from plumbing.faults import DiskFault

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
    """Yields an empty directory, which is called `path` once it is whole. Raises DiskFault."""
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            for weights in temporary.glob("*.safetensors"):  # safetensors shuts out other users
                weights.chmod(temporary.stat().st_mode & 0o666)
            remove(path)
            os.replace(temporary, path)
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


def read_jsonl(path: Path) -> list[Row]:
    """Returns the objects of a .jsonl file, none of a file that is not there; a line that was cut
    short is left out."""
    rows = []
    with suppress(FileNotFoundError):
        for line in path.read_text("utf-8", "replace").split("\n"):
            with suppress(ValueError):
                rows.append(json.loads(line))
    return rows


@cache  # of the code that this process runs, whatever is edited meanwhile
def commit() -> str:
    """Returns this checkout's commit, with "+" where tracked files differ from it; "" outside a git
    checkout."""
    describe = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    with suppress(OSError):
        told = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
        return told.stdout.strip()
    return ""
