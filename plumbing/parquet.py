"""Rows of a parquet file, read in batches; a value that Python cannot hold has a place."""

from collections.abc import Collection, Iterator
from os import PathLike
from typing import Any

from plumbing.faults import Fault


def parquet_rows(path: str | PathLike[str], columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, those of `columns` that it has (a.b: of a column a, the part b); ImportError without
    pyarrow.

    Raises Fault, with row and column, at text that is not UTF-8 and at a time or date that Python has no number for;
    pyarrow's exceptions and OSError where the file cannot be read.
    """
    import pyarrow.parquet as pq  # here: few files are parquet

    with pq.ParquetFile(path) as file:
        first, names = 1, file.schema_arrow.names
        for batch in file.iter_batches(10_000, columns=[c for c in columns if c.split(".")[0] in names]):
            try:
                rows = batch.to_pylist()
            except (ValueError, OverflowError) as e:
                raise _located(path, batch, first) or e from None
            yield from rows
            first += len(rows)


def _located(path: str | PathLike[str], batch: Any, first: int) -> Fault | None:
    for row in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                batch[name][row].as_py()
            except (ValueError, OverflowError) as e:
                kind, why = batch.schema.field(name).type, str(e).partition("\n")[0][:80]
                return Fault(f"{path}:{first + row}: {name}, a {kind}, cannot be read ({why}); write it as UTF-8 text")
    return None
