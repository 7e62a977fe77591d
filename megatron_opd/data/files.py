"""Opens the rows of data files, whatever their format, and locates each by file and line or row.

Invariant: no row is lost, no fault of a row stops the reading of the rows after it, and no more
than the places of rows is in memory, except for those of a user's own function.
"""

from __future__ import annotations

import errno
import json
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import numpy as np

from megatron_opd.config.import_path import is_import_path, load_object
from megatron_opd.config.wording import line
from megatron_opd.data.faults import Fault
from megatron_opd.data.lines import CHUNK_BYTES, LineRows, Located, chunks_of, copied, value_lines
from megatron_opd.data.shards import CSV, LINES, VALUES, data_files, kind_of
from megatron_opd.data.tables import (
    SPLITS,
    STATE,
    TableRows,
    csv_batches,
    directory_batches,
    directory_files,
    parquet_batches,
)

NOT_LINES = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*\{|\{[ \t\r]*\n)")
"""How a file begins that is named .jsonl and is an array, or objects over several lines."""


class Rows(Protocol):
    """Gives rows by number. num_bytes: how large they are, unpacked."""

    num_bytes: int

    def __len__(self) -> int:
        """Return how many rows there are."""
        ...

    def row(self, number: int) -> Located | Fault:
        """Return (where, columns) of the row of that number, from 0, or its fault."""
        ...

    def __iter__(self) -> Iterator[Located | Fault]:
        """Yield all rows in order."""
        ...


class _ListedRows:
    """Holds the rows of a user's own function."""

    num_bytes = 0

    def __init__(self, rows: list[Located]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Located:
        return self._rows[number]

    def __iter__(self) -> Iterator[Located]:
        return iter(self._rows)


class _JoinedRows:
    """Holds the rows of several files as one."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._firsts = np.cumsum([0, *map(len, parts)])
        self.num_bytes = sum(part.num_bytes for part in parts)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def row(self, number: int) -> Located | Fault:
        index = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._parts[index].row(number - int(self._firsts[index]))

    def __iter__(self) -> Iterator[Located | Fault]:
        return chain.from_iterable(self._parts)


def open_rows(
    path: Path, wanted: Sequence[str], required: Sequence[str], numbers: Sequence[str] = ()
) -> Rows:
    """Find the rows of a data path. Blank JSONL lines are not rows.

    path: a file, a folder or pattern of files, a directory of the library `datasets`, or the import
    path MODULE:FUNCTION of a user's own source. wanted: columns to read; required: those without
    which a table is refused; numbers: those that hold numbers where a format does not say.
    ValueError (one line): it cannot be read at all.
    """
    if is_source(path):
        return _ListedRows(list(called(path)))
    columns = (wanted, required, numbers)
    try:
        if is_data_set(path):
            return TableRows(directory_batches(path, columns), _unnamed())
        files = data_files(path)
        kind = kind_of(files[0])
        assert kind is not None
        if kind.name in (LINES, VALUES):
            values = kind.name == VALUES
            parts = [_lines(file, kind.packing, values=values) for file in files]
            return parts[0] if len(parts) == 1 else _JoinedRows(parts)
        batches = csv_batches if kind.name == CSV else parquet_batches
        found = (batches(file, columns, kind.packing) for file in files)
        return TableRows(chain.from_iterable(found), _unnamed())
    except OSError as error:
        why = error.strerror or line(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"{why} in {tempfile.gettempdir()}: set TMPDIR to a folder with room"
        raise ValueError(f"{path} cannot be read: {why}") from None


def located_rows(
    path: Path, wanted: Sequence[str], required: Sequence[str], numbers: Sequence[str] = ()
) -> Iterator[Located | Fault]:
    """Yield every row of a data path, or its fault; see open_rows."""
    yield from open_rows(path, wanted, required, numbers)


def is_source(path: Path) -> bool:
    """Tell whether a data path names a function, MODULE:FUNCTION, and not a file."""
    return is_import_path(str(path)) and not path.exists()


def is_data_set(path: Path) -> bool:
    """Tell whether a data path is a directory that the library `datasets` has written."""
    return (path / STATE).is_file() or (path / SPLITS).is_file()


def files_of(path: Path) -> list[Path]:
    """Return the files that hold the rows of a data path, in order. ValueError: there are none."""
    return directory_files(path) if is_data_set(path) else data_files(path)


def data_crc32(paths: Iterable[Path]) -> int:
    """Return the checksum of the bytes of data files, in order, or of the rows of sources."""
    crc = 0
    for path in paths:
        if is_source(path):
            for row in called(path):
                crc = zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode(), crc)
        else:
            for file in files_of(path):
                crc = _file_crc32(file, crc)
    return crc


def _file_crc32(path: Path, crc: int) -> int:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def called(path: Path) -> Iterator[Located]:
    """Yield the rows of a user's own source: a function that returns the same ones every time."""
    source = load_object(str(path))
    try:
        for number, row in enumerate(source(), start=1):
            if not isinstance(row, Mapping) and not hasattr(row, "to_dict"):  # a Series of pandas
                raise ValueError(
                    f"row {number} must be a mapping of columns, got {type(row).__name__}; of a "
                    "table return df.to_dict('records') or table.to_pylist()"
                )
            yield f"{path}:{number}", {str(key): value for key, value in dict(row).items()}
    except Exception as error:  # noqa: BLE001  whatever a user's function raises is told in one line
        raise ValueError(f"{path} failed: {type(error).__name__}: {line(error)}") from None


def _lines(path: Path, packing: str | None, *, values: bool) -> LineRows:
    """Return the rows of a file of lines, or of JSON values."""
    file: BinaryIO = path.open("rb")
    stream = file
    if packing is not None:
        import pyarrow

        stream = cast(BinaryIO, pyarrow.input_stream(str(path), compression=packing))
    chunks = chunks_of(stream)
    head = next(chunks, b"")
    chunks = chain([head], chunks)
    values = values or NOT_LINES.match(head) is not None
    if values:
        chunks = value_lines(path, chunks)
    if values or packing is not None:
        file = _unnamed()
        chunks = copied(chunks, file)
    return LineRows(chunks, file, f"{path} row " if values else f"{path}:", by_line=not values)


def _unnamed() -> BinaryIO:
    """Return a temporary file that is gone with the process, however that ends."""
    return cast(BinaryIO, tempfile.TemporaryFile())
