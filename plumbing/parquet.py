"""Rows of a parquet file, read in batches."""

from collections.abc import Collection, Iterator
from os import PathLike
from typing import Any

from plumbing.faults import Fault


def parquet_rows(path: str | PathLike[str], columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, those of `columns` that it has (a.b: of a column a, the part b); ImportError without
    pyarrow.

    Raises Fault at text that is not UTF-8 and at a time or date that Python has no number for; pyarrow's exceptions and
    OSError where the file cannot be read.
    """
    import pyarrow.parquet as pq  # here: few files are parquet

    with pq.ParquetFile(path) as file:
        first, names = 1, file.schema_arrow.names
        for batch in file.iter_batches(10_000, columns=[c for c in columns if c.split(".")[0] in names]):
            try:
                yield from batch.to_pylist()
            except (ValueError, OverflowError) as e:
                rows = f"rows {first} to {first + batch.num_rows - 1}"
                raise Fault(f"{path}: a value in {rows} cannot be read ({e}); write it as UTF-8 text") from None
            first += batch.num_rows
