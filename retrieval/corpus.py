"""Passages on disk: a JSONL file of any size, of which only the offsets of its rows are kept, memory-mapped."""

import gzip
import hashlib
import json
import os
import shlex
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

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
            raise Fault(f'{self.path}: no passages; write one {{"id": ..., "contents": ...}} per line')

    @property
    def size(self) -> int:
        """Returns the size of the file in bytes when the corpus was opened."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, str]:
        """Returns passage `row`, {"id", "contents"}; raises ValueError if the file has changed since it was opened."""
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        try:
            return _passage(os.pread(self._fd, end - start, start), f"{self.path}, row {row}")
        except Fault as e:
            raise ValueError(f"the corpus has changed since it was opened: {e}") from None

    @cached_property
    def digest(self) -> str:
        """Returns a hash that identifies the corpus: of its row count, its size and 256 rows spread over it."""
        sample = [self[row] for row in sorted({len(self) * k // 256 for k in range(256)})]
        return hashlib.sha256(json.dumps([len(self), self.size, sample]).encode()).hexdigest()

    def texts(self, first: int = 0, last: int | None = None) -> Iterator[str]:
        """Yields the contents of rows first, ..., last - 1 in order."""
        for row in range(first, len(self) if last is None else last):
            yield self[row]["contents"]


def _offsets(path: str) -> np.ndarray:
    """Returns the byte at which each row starts and the file's size, (rows + 1,) uint64."""
    stat = os.stat(path)
    stamp = [stat.st_size, stat.st_mtime_ns]
    cache = f"{path}.offsets"  # the stamp, then the offsets
    if os.path.exists(cache) and (cache_size := os.path.getsize(cache)) >= 24 and cache_size % 8 == 0:
        offsets = np.memmap(cache, dtype="<u8", mode="r")
        if offsets[:2].tolist() == stamp and offsets[-1] == stat.st_size:  # made from this file, and complete
            return offsets[2:]
    if stat.st_size < LARGE:
        return np.fromiter(_scan(path, stat.st_size), dtype="<u8")
    partial = f"{cache}.{uuid.uuid4().hex}"  # unique to this process, also on a shared disk
    try:
        with open(partial, "wb") as f:
            np.array(stamp, dtype="<u8").tofile(f)
            starts = _scan(path, stat.st_size)
            while len(block := np.fromiter(islice(starts, 1 << 20), dtype="<u8")):
                block.tofile(f)
        os.replace(partial, cache)
    except OSError as e:
        print(f"{cache} cannot be written ({e.strerror}): every start will scan the corpus again", flush=True)
        return np.fromiter(_scan(path, stat.st_size), dtype="<u8")
    finally:
        _discard(partial)
    return np.memmap(cache, dtype="<u8", mode="r")[2:]


def _discard(partial: str) -> None:
    """Removes a partial file, after Ctrl-C too."""
    with suppress(OSError):  # already renamed, or the disk is read-only
        os.unlink(partial)


def _scan(path: str, size: int) -> Iterator[int]:
    """Yields where each row starts, then the file's size; raises Fault at a row that is not a passage."""
    from tqdm import tqdm  # here: only a large corpus needs a progress bar

    with open(path, "rb") as f, tqdm(
        total=size, unit="B", unit_scale=True, desc=f"reading {Path(path).name}", disable=size < LARGE
    ) as bar:  # fmt: skip
        if command := _unpacking(path):
            raise Fault(f"{path}: passages are packed in it; run `{command}` first")
        start = shown = 0
        for number, line in enumerate(f, 1):
            if line.strip():
                _passage(line, f"{path}:{number}")
                yield start
            start += len(line)
            if start - shown > 1 << 22:
                bar.update(start - shown)
                shown = start
        bar.update(start - shown)
        yield start


def _unpacking(name: str) -> str:
    """Returns the command that takes passages out of a gzip file, a tar archive, or both; "" for any other file.

    Search-R1's wiki-18.jsonl.gz is both, whatever it is called.
    """
    with open(name, "rb") as f:
        start = f.read(512)
    if zipped := start.startswith(b"\x1f\x8b"):
        with suppress(OSError, EOFError, zlib.error), gzip.open(name) as f:
            start = f.read(512)
    path, part = shlex.quote(name), shlex.quote(f"{name}.part")
    out = shlex.quote(name.removesuffix(".gz")) if name.endswith(".gz") else f"{part} && mv {part} {path}"
    if start[257:262] == b"ustar":
        return f"tar -xO{'z' * zipped}f {path} > {out}"
    return f"gunzip -c < {path} > {out}" if zipped else ""


def _passage(line: bytes, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise Fault(f"{where}: not valid JSON ({e}); {FORM}") from None
    if not isinstance(row, dict):
        raise Fault(f"{where}: a row is a JSON object, not {type(row).__name__}; {FORM}")
    titled = "contents" not in row and "title" in row
    for field in ("id", "title", "text") if titled else ("id", "contents"):
        if field not in row:
            raise Fault(f'{where}: no "{field}"; {FORM}')
        if type(row[field]) not in ((str, int) if field == "id" else (str,)):
            raise Fault(f'{where}: "{field}" is of type {type(row[field]).__name__}; {FORM}')
    contents = f'"{row["title"]}"\n{row["text"]}' if titled else row["contents"]
    passage = {"id": str(row["id"]), "contents": contents}
    try:
        "".join(passage.values()).encode()
    except UnicodeEncodeError:  # JSON can encode half a character; UTF-8, and so a response, cannot
        raise Fault(f"{where}: half of a surrogate pair; write the whole character") from None
    return passage


def _as_jsonl(path: str) -> str:
    """Writes a parquet file's rows as JSONL beside it, once; returns the JSONL's path."""
    import pyarrow as pa  # here: few corpora are parquet

    out = f"{path}.jsonl"
    partial = f"{out}.{uuid.uuid4().hex}"
    try:
        mtime = os.stat(path).st_mtime_ns
        if os.path.exists(out) and os.stat(out).st_mtime_ns == mtime:
            return out
        print(f"{path}: writing it out as {out}", flush=True)
        with open(partial, "w", encoding="utf-8") as f:
            rows = parquet_rows(path, ("id", "contents", "title", "text"))
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.utime(partial, ns=(mtime, mtime))  # marks which version of the parquet file it was made from
        os.replace(partial, out)
    except (pa.ArrowInvalid, TypeError) as e:  # TypeError: a column that JSON cannot represent
        reason = str(e).splitlines()[0]
        raise Fault(f"{path}: not a parquet file of passages ({reason}); give one as --corpus") from None
    except OSError as e:
        reason = e.strerror or str(e).splitlines()[0]
        raise Fault(f"{e.filename or path}: {reason}; give a readable file as --corpus") from None
    finally:
        _discard(partial)
    return out
