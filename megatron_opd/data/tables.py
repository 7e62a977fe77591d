"""Reads tables: parquet, CSV, and directories that the library `datasets` has written.

Invariant: nothing of a data set is run or unpickled; of its directory only the files are opened
that state.json lists, and only where they lie inside it. No more than a batch is in memory.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, cast

import numpy as np

from megatron_opd.config.wording import line, listed, shown
from megatron_opd.data.faults import Fault
from megatron_opd.data.key_paths import column_of
from megatron_opd.data.lines import Located
from megatron_opd.data.plain import table_rows

STATE, SPLITS = "state.json", "dataset_dict.json"
END = b"\xff\xff\xff\xff\0\0\0\0"
"""How an arrow stream ends; one cut off between two parts could be read without those missing."""
BATCH_ROWS, BATCH_BYTES = 256, 2**18
"""Most rows, and about the most bytes, that are read to have one row."""
READ_BYTES = 2**20
CSV_BLOCK_BYTES = 2**24
"""Bytes of CSV that are parsed at once, and so the longest row."""


class ColumnsDiffer(ValueError):
    """Reports a table that lacks a column, or has one twice."""


class TableRows:
    """Holds the rows of tables in a temporary file without a name, to be read one by one.

    Batches of rows are written with a schema each, so that those of one file may differ from those
    of the next. batches: (where, rows before it there, table of few rows), in order.
    """

    def __init__(self, batches: Iterable[tuple[str, int, Any]], spool: BinaryIO) -> None:
        self._spool, self._lock = spool, Lock()
        self._places: list[tuple[int, str, int]] = []
        firsts, place, rows = [0], 0, 0
        for where, before, batch in batches:
            message = _written(batch)
            spool.write(message)
            self._places.append((place, where, before))
            place += len(message)
            rows += batch.num_rows
            firsts.append(rows)
        spool.flush()
        self.num_bytes = place
        self._firsts = np.array(firsts)
        self._held: tuple[int, Any] = -1, None

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def row(self, number: int) -> Located | Fault:
        """Return the row of that number, from 0, or its fault."""
        import pyarrow

        index = int(np.searchsorted(self._firsts, number, side="right")) - 1
        _, where, before = self._places[index]
        at = number - int(self._firsts[index])
        where = f"{where} row {before + at + 1}"
        try:
            (row,) = table_rows(self._batch(index).slice(at, 1))
        except (
            pyarrow.ArrowException,
            ValueError,
            OverflowError,
            KeyError,
        ) as error:
            return Fault("malformed", where, f"a value cannot be read ({line(error)})")
        return where, row

    def __iter__(self) -> Iterator[Located | Fault]:
        return (self.row(number) for number in range(len(self)))

    def _batch(self, index: int) -> Any:
        import pyarrow

        with self._lock:
            if self._held[0] != index:
                place = self._places[index][0]
                after = self._places[index + 1 :][:1]
                size = (after[0][0] if after else self.num_bytes) - place
                content = os.pread(self._spool.fileno(), size, place)
                with pyarrow.ipc.open_stream(content) as reader:
                    self._held = index, reader.read_next_batch()
            return self._held[1]


Batches = Iterator[tuple[str, int, Any]]
Wanted = tuple[Sequence[str], Sequence[str], Sequence[str]]
"""Columns to read, those without which a table is refused, and those that hold numbers."""


def parquet_batches(path: Path, columns: Wanted, packing: str | None = None) -> Batches:
    """Yield the columns of a parquet file. ValueError: it cannot be read.

    packing: none, it is compressed inside.
    """
    from pyarrow import parquet

    def batches() -> Iterator[Any]:
        # without these two a whole group of rows would be in memory
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            names = _columns(path, file.schema_arrow.names, columns)
            yield from file.iter_batches(BATCH_ROWS, columns=names, use_threads=False)

    return _located(path, "parquet", batches())


def csv_batches(path: Path, columns: Wanted, packing: str | None) -> Batches:
    """Yield the columns of a CSV file whose first row names them. ValueError: it cannot be read.

    An empty field is a missing value. Columns are text as it stands, so that 007 and 1.50 stay what
    they are, but for those that hold numbers.
    """
    import pyarrow
    from pyarrow import csv as arrow_csv

    numbers = columns[2]

    def opened(names: Sequence[str] | None) -> Any:
        convert = arrow_csv.ConvertOptions(
            column_types={name: pyarrow.string() for name in names or () if name not in numbers},
            include_columns=names,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        return arrow_csv.open_csv(
            pyarrow.input_stream(str(path), compression=packing),
            arrow_csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES),
            arrow_csv.ParseOptions(newlines_in_values=True),
            convert,
        )

    def batches() -> Iterator[Any]:
        _check_quotes(path, packing)
        with opened(None) as reader:
            present = reader.schema.names
        with opened(_columns(path, present, columns)) as reader:
            yield from reader

    return _located(path, "csv", batches())


def _check_quotes(path: Path, packing: str | None) -> None:
    """Raise ValueError for a quote that does not close: pyarrow takes all rows behind it for text.

    Nor may a quoted text go on behind its closing quote, where a stray one has opened it.
    """
    import pyarrow

    csv.field_size_limit(CSV_BLOCK_BYTES)
    stream = cast(BinaryIO, pyarrow.input_stream(str(path), compression=packing))
    with TextIOWrapper(stream, encoding="utf-8", errors="replace", newline="") as text:
        rows = csv.reader(text, strict=True)
        try:
            for _ in rows:
                pass
        except csv.Error as error:
            raise ValueError(
                f"a quote is not closed well, up to line {rows.line_num}: {error}"
            ) from None


def directory_batches(path: Path, columns: Wanted) -> Batches:
    """Yield the columns of a data set on disk. ValueError: it cannot be read."""
    import pyarrow

    def batches(file: Path) -> Iterator[Any]:
        source = pyarrow.memory_map(str(file))
        if source.size() < len(END) or source.read_at(len(END), source.size() - len(END)) != END:
            raise ValueError("it does not end as a stream does: it was not written to its end")
        with pyarrow.ipc.open_stream(source) as reader:
            names = _columns(file, reader.schema.names, columns)
            for batch in reader:
                yield batch.select(names)

    rows = 0
    for file in directory_files(path):
        for _, _, batch in _located(file, "arrow", batches(file)):
            yield str(path), rows, batch
            rows += batch.num_rows


def directory_files(path: Path) -> list[Path]:
    """Return the arrow files of a data set on disk, in order. ValueError: it is none."""
    if (path / SPLITS).is_file():
        splits = _json(path / SPLITS).get("splits")
        names = [name for name in splits if isinstance(name, str)] if splits else []
        raise ValueError(
            f"{path} holds the splits {', '.join(map(shown, names)) or 'none'}: name one of them, "
            f"such as {path / (names[0] if names else 'train')}"
        )
    state = _json(path / STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ValueError(
            f"{path} holds a selection of rows beside its rows: save it again after "
            "flatten_indices()"
        )
    files = state.get("_data_files")
    if not isinstance(files, list):
        raise ValueError(f"{path / STATE} must list _data_files, got {shown(files)}")
    return [path / _file_name(path, each) for each in files]


def _located(path: Path, kind: str, batches: Iterator[Any]) -> Batches:
    """Yield small batches, each with its place. ValueError: no `kind` file, or a damaged one."""
    import pyarrow

    rows = 0
    try:
        for large in batches:
            large.validate(full=True)  # offsets beyond the data would be read
            count = BATCH_ROWS
            if large.nbytes > BATCH_BYTES:
                count = max(1, min(count, large.num_rows * BATCH_BYTES // large.nbytes))
            for start in range(0, large.num_rows, count):
                batch = large.slice(start, count)
                yield str(path), rows, batch
                rows += batch.num_rows
    except ColumnsDiffer:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: not a readable {kind} file ({line(error)})") from None


def _written(batch: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _file_name(path: Path, entry: Any) -> str:
    name = entry.get("filename") if isinstance(entry, dict) else None
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        raise ValueError(f"{path / STATE}: data files lie in the directory, got {shown(name)}")
    if not (path / name).is_file():
        raise ValueError(f"data file not found: {path / name}, which {STATE} lists")
    return name


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {line(error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(found).__name__}")
    return found


def _columns(path: Path, present: Sequence[str], columns: Wanted) -> list[str]:
    """Return the wanted columns that are there. ColumnsDiffer: one lacks, or is there twice."""
    wanted, required, _ = columns
    wanted = list(dict.fromkeys(column_of(present, key) for key in wanted))
    for key in wanted:
        if present.count(key) > 1:
            raise ColumnsDiffer(f"{path}: column {key!r} occurs {present.count(key)} times")
    for key in required:
        if column_of(present, key) not in present:
            raise ColumnsDiffer(
                f"{path}: missing column {key!r}; the columns are {listed(present)}"
            )
    return [key for key in wanted if key in present]
