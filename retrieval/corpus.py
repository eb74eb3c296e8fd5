"""Passages on disk: a JSONL file of any size of which only the offsets of its rows are held, memory-mapped."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

FORM = 'write one {"id": ..., "contents": "\\"Title\\"\\ntext"} a line'
LARGE = 64 << 20  # bytes; the offsets of a larger corpus are kept in a file, those of a smaller one take no time


class Corpus:
    """The passages {"id", "contents"} of a JSONL or parquet file, by row number; read from the file when asked for.

    Rows are Search-R1's {"id", "contents"}, or {"id", "title", "text"}; empty lines do not count. The first opening
    reads and checks every row (SystemExit names a bad one) and leaves the offsets in `<path>.offsets`; later ones
    take no time. A row of a parquet file cannot be had without its whole row group, so such a file is first
    written out as `<path>.jsonl`. Safe to read from several threads.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = str(path)
        if self.path.endswith(".parquet"):
            self.path = _as_jsonl(self.path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY)
            self._starts = _offsets(self.path)
        except OSError as e:
            raise SystemExit(f"{self.path}: {e.strerror}; give a readable JSONL file as --corpus") from None
        if not len(self):
            raise SystemExit(f'{self.path}: no passages; write one {{"id": ..., "contents": ...}} a line')

    @property
    def size(self) -> int:
        """Bytes of the file when its rows were counted."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, str]:
        """Returns passage `row`, {"id", "contents"}; ValueError where the file has changed since it was opened."""
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        try:
            return _passage(os.pread(self._fd, end - start, start), f"{self.path}, row {row}")
        except SystemExit as e:
            raise ValueError(f"the corpus has changed since the server started: {e}") from None

    @cached_property
    def digest(self) -> str:
        """What tells this corpus from others: of its number of rows, its bytes and 256 rows from all over it."""
        sample = [self[row] for row in sorted({len(self) * k // 256 for k in range(256)})]
        return hashlib.sha256(json.dumps([len(self), self.size, sample]).encode()).hexdigest()

    def texts(self, first: int = 0, last: int | None = None) -> Iterator[str]:
        """Yields the contents of the rows first, ..., last - 1 in their order."""
        for row in range(first, len(self) if last is None else last):
            yield self[row]["contents"]


def _offsets(path: str) -> np.ndarray:
    """Returns the byte at which each row starts and the file's size, (rows + 1,) uint64."""
    stat = os.stat(path)
    stamp = [stat.st_size, stat.st_mtime_ns]
    kept = f"{path}.offsets"  # the stamp, then the offsets
    if os.path.exists(kept) and (length := os.path.getsize(kept)) >= 24 and length % 8 == 0:
        offsets = np.memmap(kept, dtype="<u8", mode="r")
        if offsets[:2].tolist() == stamp and offsets[-1] == stat.st_size:  # of this file, and whole
            return offsets[2:]
    if stat.st_size < LARGE:
        return np.fromiter(_scan(path, stat.st_size), dtype="<u8")
    half = f"{kept}.{uuid.uuid4().hex}"  # of this process alone, on shared disks too
    try:
        with open(half, "wb") as f:
            np.array(stamp, dtype="<u8").tofile(f)
            starts = _scan(path, stat.st_size)
            while len(block := np.fromiter(islice(starts, 1 << 20), dtype="<u8")):
                block.tofile(f)
        os.replace(half, kept)
    except OSError as e:
        print(f"{kept} cannot be written ({e.strerror}): every start reads the corpus anew", flush=True)
        return np.fromiter(_scan(path, stat.st_size), dtype="<u8")
    finally:
        _forget(half)
    return np.memmap(kept, dtype="<u8", mode="r")[2:]


def _forget(path: str) -> None:
    """Leaves no half of a file, after Ctrl-C too."""
    with suppress(OSError):  # it was renamed, or the disk is read-only
        os.unlink(path)


def _scan(path: str, size: int) -> Iterator[int]:
    """Yields where each row starts, then the file's size; SystemExit names a row that is no passage."""
    from tqdm import tqdm  # here: a small corpus needs no bar, and a small server no tqdm

    with open(path, "rb") as f, tqdm(
        total=size, unit="B", unit_scale=True, desc=f"reading {Path(path).name}", disable=size < LARGE
    ) as bar:  # fmt: skip
        if f.read(2) == b"\x1f\x8b":
            raise SystemExit(f"{path}: compressed with gzip; run `gunzip {path}` first")
        f.seek(0)
        start = seen = 0
        for number, line in enumerate(f, 1):
            if line.strip():
                _passage(line, f"{path}:{number}")
                yield start
            start += len(line)
            if start - seen > 1 << 22:
                bar.update(start - seen)
                seen = start
        bar.update(start - seen)
        yield start


def _passage(line: bytes, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise SystemExit(f"{where}: not valid JSON ({e}); {FORM}") from None
    if not isinstance(row, dict):
        raise SystemExit(f"{where}: a row is a JSON object, not {type(row).__name__}; {FORM}")
    titled = "contents" not in row and "title" in row
    for field in ("id", "title", "text") if titled else ("id", "contents"):
        if field not in row:
            raise SystemExit(f'{where}: no "{field}"; {FORM}')
        if type(row[field]) not in ((str, int) if field == "id" else (str,)):
            raise SystemExit(f'{where}: "{field}" is of type {type(row[field]).__name__}; {FORM}')
    contents = f'"{row["title"]}"\n{row["text"]}' if titled else row["contents"]
    passage = {"id": str(row["id"]), "contents": contents}
    try:
        "".join(passage.values()).encode()
    except UnicodeEncodeError:  # JSON can write half a character; UTF-8, and so a response, cannot
        raise SystemExit(f"{where}: half of a surrogate pair; write the whole character") from None
    return passage


def _as_jsonl(path: str) -> str:
    """Writes a parquet file's rows as JSONL beside it, once; returns the JSONL's path."""
    import pyarrow as pa  # here: few corpora are parquet
    import pyarrow.parquet as pq

    out = f"{path}.jsonl"
    half = f"{out}.{uuid.uuid4().hex}"
    try:
        time = os.stat(path).st_mtime_ns
        if os.path.exists(out) and os.stat(out).st_mtime_ns == time:
            return out
        print(f"{path}: writing it out as {out}", flush=True)
        with pq.ParquetFile(path) as parquet, open(half, "w", encoding="utf-8") as f:
            names = [n for n in ("id", "contents", "title", "text") if n in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(10_000, columns=names):
                f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in batch.to_pylist())
        os.utime(half, ns=(time, time))  # the mark of the parquet file that it came from
        os.replace(half, out)
    except (pa.ArrowInvalid, TypeError) as e:  # TypeError: a column that JSON cannot write
        why = str(e).splitlines()[0]
        raise SystemExit(f"{path}: not a parquet file of passages ({why}); give one as --corpus") from None
    except OSError as e:
        why = e.strerror or str(e).splitlines()[0]
        raise SystemExit(f"{e.filename or path}: {why}; give a readable file as --corpus") from None
    finally:
        _forget(half)
    return out
