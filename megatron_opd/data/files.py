"""Reads the rows of a data file, whatever its format, and locates each by file and line or row.

Invariant: no row is lost, and no fault of a row stops the reading of the rows after it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron_opd.config.import_path import is_import_path, load_object
from megatron_opd.config.wording import line, shown
from megatron_opd.data.faults import Fault, Unusable
from megatron_opd.data.tables import Located, directory_files, directory_rows, parquet_rows

SUFFIXES = (".jsonl", ".parquet")
MAX_LINE_BYTES = 64 * 2**20
"""Longest line of a JSONL file: a file without line ends would fill the memory otherwise."""
CHUNK_BYTES = 2**20


def located_rows(
    path: Path, wanted: Sequence[str], required: Sequence[str]
) -> Iterator[Located | Fault]:
    """Yield (where, columns) or the fault of every row. Blank JSONL lines are not rows.

    path: a file, a directory of the library `datasets`, or the import path MODULE:FUNCTION of a
    user's own source. wanted: columns to read; required: those without which a table is refused.
    ValueError (one line): it cannot be read at all.
    """
    if is_source(path):
        return _called(path)
    if path.is_dir():
        return directory_rows(path, wanted, required)
    if not path.is_file():
        raise ValueError(f"data file not found: {path}")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: data files end with {' or '.join(SUFFIXES)}")
    return _jsonl(path) if path.suffix == ".jsonl" else parquet_rows(path, wanted, required)


def is_source(path: Path) -> bool:
    """Tell whether a data path names a function, MODULE:FUNCTION, and not a file."""
    return is_import_path(str(path)) and not path.exists()


def data_crc32(paths: Iterable[Path]) -> int:
    """Return the checksum of the bytes of data files, in order, or of the rows of sources."""
    crc = 0
    for path in paths:
        if is_source(path):
            for row in _called(path):
                crc = zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode(), crc)
        else:
            for file in directory_files(path) if path.is_dir() else [path]:
                crc = _file_crc32(file, crc)
    return crc


def _file_crc32(path: Path, crc: int) -> int:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _called(path: Path) -> Iterator[Located]:
    """Yields the rows of a user's own source: a function that returns the same ones every time."""
    source = load_object(str(path))
    try:
        for number, row in enumerate(source(), start=1):
            yield f"{path}:{number}", dict(row)
    except Exception as error:  # noqa: BLE001  whatever a user's function raises is told in one line
        raise ValueError(f"{path} failed: {type(error).__name__}: {line(error)}") from None


def _jsonl(path: Path) -> Iterator[Located | Fault]:
    try:
        with path.open("rb") as file:
            for number, written in enumerate(_lines(file), start=1):
                where = f"{path}:{number}"
                try:
                    row = _json_row(written, first=number == 1)
                except Unusable as error:
                    yield error.at(where)
                    continue
                if row is not None:
                    yield where, row
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield every line; of one that is too long, no more than shows that it is."""
    while written := file.readline(MAX_LINE_BYTES + 1):
        rest = written
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield written


def _json_row(written: bytes, *, first: bool) -> dict[str, Any] | None:
    if len(written) > MAX_LINE_BYTES:
        raise Unusable("malformed", f"a line may have {MAX_LINE_BYTES} bytes, this one has more")
    try:
        text = written.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise Unusable("malformed", f"not UTF-8 ({error.reason})") from None
    if not text.strip():
        return None
    try:
        row: Any = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Unusable("malformed", f"malformed JSON ({error})") from None
    if not isinstance(row, dict):
        raise Unusable("malformed", f"must be a JSON object, got {type(row).__name__}")
    return row  # pyright: ignore[reportUnknownVariableType]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object whose keys occur once; json would silently take the second of two values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unusable("malformed", f"key {shown(twice)} is given twice")
    return found
