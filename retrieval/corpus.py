"""Passages on disk: a JSONL file of any size, of which only the offsets of its rows are kept, memory-mapped."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np
from tqdm import tqdm

from plumbing.faults import Fault
from plumbing.parquet import parquet_rows

FORM = 'write one {"id": ..., "contents": "\\"Title\\"\\ntext"} per line'
LARGE = 64 << 20  # bytes; a larger corpus keeps its offsets in a file, a smaller one is scanned at every start


class Corpus:
    """The passages {"id", "contents"} of a JSONL or parquet file, by row number; each is read from disk on access.

    Rows are Search-R1's {"id", "contents"}, or {"id", "title", "text"}; empty lines do not count. Opening a corpus
    reads and checks every row and raises Fault at a bad one. A large corpus leaves its offsets in `<path>.offsets`, so
    that opening it again takes no time. A parquet file is first written out as `<path>.jsonl`, because it cannot
    return a row without reading the whole row group. Safe to read from several threads.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = str(path)
        if self.path.endswith(".parquet"):
            self.path = _as_jsonl(self.path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY)
            self._starts = _offsets(self.path)
        except OSError as e:
            raise Fault(f"{self.path}: {e.strerror}; give a readable JSONL file as --corpus") from None
        if not len(self):
            raise Fault(f"{self.path}: no passages; {FORM}")

    @property
    def size(self) -> int:
        """The size of the file in bytes when the corpus was opened."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, str]:
        """Reads passage `row`, {"id", "contents"}; raises ValueError if the file has changed since it was opened."""
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        try:
            return _passage(os.pread(self._fd, end - start, start), f"{self.path}, row {row}")
        except Fault as e:
            raise ValueError(f"the corpus has changed since it was opened: {e}") from None

    def texts(self) -> Iterator[str]:
        """The contents of all passages, in order."""
        return (passage["contents"] for passage in self)

    @cached_property
    def digest(self) -> str:
        """A hash that identifies the corpus: of its row count, its size and 256 rows spread over it."""
        sample = [self[row] for row in sorted({len(self) * k // 256 for k in range(256)})]
        return hashlib.sha256(json.dumps([len(self), self.size, sample]).encode()).hexdigest()


def _offsets(path: str) -> np.ndarray:
    """Returns the byte at which each row starts and the file's size, (rows + 1,) uint64."""
    stat = os.stat(path)
    stamp = np.array([stat.st_size, stat.st_mtime_ns], dtype="<u8")
    cache = f"{path}.offsets"  # the stamp, then the offsets
    with suppress(OSError, ValueError):  # there is none, or it is cut off within an offset
        kept = np.memmap(cache, dtype="<u8", mode="r")
        if (kept[:2] == stamp).all() and kept[-1] == stat.st_size:  # made from this file, and complete
            return kept[2:]
    offsets = np.fromiter(_scan(path, stat.st_size), dtype="<u8")
    if stat.st_size >= LARGE:
        try:
            with _written(cache) as partial, open(partial, "wb") as f:
                f.write(np.concatenate([stamp, offsets]))
        except OSError as e:
            print(f"{cache} cannot be written ({e.strerror}): every start will scan the corpus again", flush=True)
    return offsets


def _scan(path: str, size: int) -> Iterator[int]:
    """Yields where each row starts, then the file's size; raises Fault at a row that is not a passage."""
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=f"reading {Path(path).name}", disable=size < LARGE)
    with bar, open(path, "rb") as f:
        head = f.peek()
        if (zipped := head.startswith(b"\x1f\x8b")) or head[257:262] == b"ustar":
            tar = f"tar -xO{'z' * zipped}f"  # Search-R1's wiki-18.jsonl.gz is a tar archive, whatever its name says
            raise Fault(f"{path}: packed; unpack it first, with `{tar}` if it is Search-R1's, else with `gunzip`")
        start = 0
        for number, line in enumerate(f, 1):
            if line.strip():
                _passage(line, f"{path}:{number}")
                yield start
            start += len(line)
            bar.update(len(line))
        yield start


def _passage(line: bytes, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
        titled = "contents" not in row and "title" in row
        if type(row["id"]) not in (str, int):
            raise TypeError(f'"id" is of type {type(row["id"]).__name__}')
        texts = [row["title"], row["text"]] if titled else [row["contents"]]
        "".join([str(row["id"]), *texts]).encode()  # half of a surrogate pair cannot be sent
    except KeyError as e:
        raise Fault(f'{where}: no "{e.args[0]}"; {FORM}') from None
    except (ValueError, TypeError, RecursionError) as e:
        raise Fault(f"{where}: not a passage ({e}); {FORM}") from None
    return {"id": str(row["id"]), "contents": '"{}"\n{}'.format(*texts) if titled else texts[0]}


@contextmanager
def _written(path: str) -> Iterator[str]:
    """Yields a name for a new file, which replaces `path` if all goes well and is removed if not, also after Ctrl-C."""
    partial = f"{path}.{uuid.uuid4().hex}"  # unique to this process, also on a shared disk
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with suppress(OSError):  # renamed, or never made
            os.unlink(partial)


def _as_jsonl(path: str) -> str:
    """Writes a parquet file's rows as JSONL next to it, once for each version; returns the JSONL's path."""
    out = f"{path}.jsonl"
    try:
        mtime = os.stat(path).st_mtime_ns
        if not os.path.exists(out) or os.stat(out).st_mtime_ns != mtime:
            print(f"{path}: writing it out as {out}", flush=True)
            with _written(out) as partial:
                with open(partial, "w", encoding="utf-8") as f:
                    rows = parquet_rows(path, ("id", "contents", "title", "text"))
                    f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                os.utime(partial, ns=(mtime, mtime))  # marks which version of the parquet file it was made from
    except (OSError, ValueError, TypeError) as e:  # pyarrow's own are ValueErrors; JSON cannot represent every column
        reason = getattr(e, "strerror", None) or str(e).partition("\n")[0]
        raise Fault(f"{path}: cannot be written out as {out} ({reason}); give a parquet file of passages") from None
    return out
