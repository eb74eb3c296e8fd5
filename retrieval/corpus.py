"""Passages on disk: a JSONL file of any size, of which only the offsets of its rows are kept in memory."""

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from plumbing.faults import Fault
from plumbing.parquet import parquet_rows

FORM = 'a corpus is unpacked and has one {"id": ..., "contents": "\\"Title\\"\\ntext"} per line'


class Corpus:
    """The passages {"id", "contents"} of a JSONL or parquet file, by row number; each is read from disk on access.

    Rows are Search-R1's {"id", "contents"}, or {"id", "title", "text"}; blank lines do not count. Opening a corpus
    reads it once to find where its rows begin; a row is checked when it is read. A parquet file is first written out as
    `<path>.jsonl`, because it cannot return a row without reading the whole row group. Safe to read from several
    threads.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = str(path)
        try:
            if self.path.endswith(".parquet"):
                self.path = _write_as_jsonl(self.path)
            self._fd = os.open(self.path, os.O_RDONLY)
            self._starts = np.fromiter(_find_rows(self.path), dtype=np.uint64)
        except (OSError, ValueError, TypeError) as e:  # pyarrow's own are ValueErrors; JSON cannot hold every column
            reason = getattr(e, "strerror", None) or str(e).partition("\n")[0]
            raise Fault(f"{self.path}: {reason}; give a readable .jsonl or .parquet file as --corpus") from None
        if not len(self):
            raise Fault(f"{self.path}: no passages; {FORM}")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, str]:
        """Reads passage `row`, {"id", "contents"}; raises Fault if it is none, also because the file has changed."""
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        try:
            fields = json.loads(os.pread(self._fd, end - start, start))
            contents = fields["contents"] if "contents" in fields else '"' + fields["title"] + '"\n' + fields["text"]
            passage = {"id": str(fields["id"]), "contents": contents}
            "".join(passage.values()).encode()  # half of a surrogate pair cannot be sent
        except (ValueError, TypeError, LookupError, RecursionError) as e:
            raise Fault(f"{self.path}, row {row}: not a passage ({type(e).__name__}: {e}); {FORM}") from None
        return passage

    def texts(self) -> Iterator[str]:
        """The contents of all passages, in order."""
        return (passage["contents"] for passage in self)

    @cached_property
    def digest(self) -> str:
        """A hash that identifies the corpus: of its row count, its size and 256 rows spread over it."""
        sample = [self[row] for row in sorted({len(self) * k // 256 for k in range(256)})]
        return hashlib.sha256(json.dumps([len(self), int(self._starts[-1]), sample]).encode()).hexdigest()


def _find_rows(path: str) -> Iterator[int]:
    """Yields the byte at which each row starts, then the file's size."""
    start = 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                yield start
            start += len(line)
    yield start


def _write_as_jsonl(path: str) -> str:
    """Writes a parquet file's rows as JSONL next to it, once for each version; returns the JSONL's path."""
    out, partial = f"{path}.jsonl", f"{path}.jsonl.partial"
    mtime = os.stat(path).st_mtime_ns
    if not os.path.exists(out) or os.stat(out).st_mtime_ns != mtime:
        print(f"{path}: writing it out as {out}", flush=True)
        with open(partial, "w") as file:
            rows = parquet_rows(path, ("id", "contents", "title", "text"))
            file.writelines(json.dumps(row) + "\n" for row in rows)
        os.utime(partial, ns=(mtime, mtime))  # marks which version of the parquet file it was made from
        os.replace(partial, out)
    return out
