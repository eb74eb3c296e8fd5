"""Passages on disk: a JSONL file of any size, of which only the offsets of its rows are kept in
memory."""

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from plumbing.faults import Fault
from plumbing.outside import contents_of

FORM = 'a corpus is unpacked JSONL: one {"id": ..., "contents": "\\"Title\\"\\ntext"} per line'


class Corpus:
    """The passages {"id", "contents"} of a JSONL file, by row number from 0; each is read from disk
    on access.

    Rows are Search-R1's {"id", "contents"}, or {"id", "title", "text"}, with `_id` in BEIR's;
    blank lines do not count.
    Opening a corpus reads it once to find where its rows begin; a row is checked when it is read.
    Safe to read from several threads.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = str(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY)
            os.lseek(self._fd, 0, os.SEEK_END)  # no pipe: rows are read in any order
            self._starts = np.fromiter(_find_rows(self.path), dtype=np.uint64)
        except OSError as e:
            raise Fault(
                f"{self.path}: {e.strerror}; give a readable JSONL file as --corpus"
            ) from None
        if not len(self):
            raise Fault(f"{self.path}: no passages; {FORM}")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, str]:
        """Reads passage `row`, {"id", "contents"}; raises Fault if it is none, also because the
        file has changed."""
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        try:
            fields = json.loads(os.pread(self._fd, end - start, start))
            id = fields["_id" if "_id" in fields and "id" not in fields else "id"]
            passage = {"id": str(id), "contents": contents_of(fields)}
            # half of a surrogate pair cannot be sent
            (passage["id"] + passage["contents"]).encode()
        except (ValueError, TypeError, LookupError, RecursionError) as e:
            raise Fault(
                f"{self.path}, row {row + 1}: not a passage ({type(e).__name__}: {e}); {FORM}"
            ) from None
        return passage

    def texts(self) -> Iterator[str]:
        """The contents of all passages, in order."""
        return (self[row]["contents"] for row in range(len(self)))

    @cached_property
    def digest(self) -> str:
        """A hash that identifies the corpus: of its row count, its size and 256 rows spread over
        it."""
        sample = [self[row] for row in sorted({len(self) * k // 256 for k in range(256)})]
        return hashlib.sha256(
            json.dumps([len(self), int(self._starts[-1]), sample]).encode()
        ).hexdigest()


def _find_rows(path: str) -> Iterator[int]:
    """Yields the byte at which each row starts, then the file's size."""
    start = 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                yield start
            start += len(line)
    yield start
