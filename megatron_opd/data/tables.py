"""Reads parquet files, and directories that the library `datasets` has written (save_to_disk).

Invariant: nothing of a data set is run or unpickled; of its directory only the files are opened
that state.json lists, and only where they lie inside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_opd.config.wording import line, shown
from megatron_opd.data.key_paths import column_of
from megatron_opd.data.plain import table_rows
from megatron_opd.data.values import listed

STATE, SPLITS = "state.json", "dataset_dict.json"
END = b"\xff\xff\xff\xff\0\0\0\0"
"""How an arrow stream ends; one cut off between two parts could be read without those missing."""

Located = tuple[str, dict[str, Any]]
ResultT = TypeVar("ResultT")


def parquet_rows(path: Path, wanted: Sequence[str], required: Sequence[str]) -> Iterator[Located]:
    """Yield (file and row, columns) of a parquet file. ValueError: it cannot be read."""
    from pyarrow import parquet

    present = _readable(path, "parquet", lambda: parquet.read_schema(path).names)
    names = _columns(path, present, wanted, required)
    table = _readable(path, "parquet", lambda: parquet.read_table(path, columns=names))
    for number, row in enumerate(_readable(path, "parquet", lambda: _rows(table)), start=1):
        yield f"{path} row {number}", row


def directory_rows(path: Path, wanted: Sequence[str], required: Sequence[str]) -> Iterator[Located]:
    """Yield (directory and row, columns) of a data set on disk. ValueError: it cannot be read."""
    import pyarrow

    def stream(file: Path) -> Any:
        source = pyarrow.memory_map(str(file))
        if source.size() < len(END) or source.read_at(len(END), source.size() - len(END)) != END:
            raise ValueError("it does not end as a stream does: it was not written to its end")
        return pyarrow.ipc.open_stream(source).read_all()

    number = 0
    for file in directory_files(path):
        table = _readable(file, "arrow", partial(stream, file))
        chosen = table.select(_columns(path, table.column_names, wanted, required))
        for row in _readable(file, "arrow", partial(_rows, chosen)):
            number += 1
            yield f"{path} row {number}", row


def directory_files(path: Path) -> list[Path]:
    """Return the arrow files of a data set on disk, in order. ValueError: it is none."""
    if (path / SPLITS).is_file():
        splits = _json(path / SPLITS).get("splits")
        names = [name for name in splits if isinstance(name, str)] if splits else []
        raise ValueError(
            f"{path} holds the splits {', '.join(map(shown, names)) or 'none'}: name one of them, "
            f"such as {path / (names[0] if names else 'train')}"
        )
    if not (path / STATE).is_file():
        raise ValueError(
            f"{path} is a directory without {STATE}: name its .jsonl or .parquet files, or a "
            "directory that save_to_disk of the library datasets has written"
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


def _readable(path: Path, kind: str, read: Callable[[], ResultT]) -> ResultT:
    """Return what `read` returns. ValueError: the file is no `kind` file, or a damaged one."""
    import pyarrow

    try:
        return read()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: not a readable {kind} file ({line(error)})") from None


def _rows(table: Any) -> list[dict[str, Any]]:
    table.validate(full=True)  # offsets beyond the data would be read
    return table_rows(table)


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


def _columns(
    path: Path, present: Sequence[str], wanted: Sequence[str], required: Sequence[str]
) -> list[str]:
    """Return the wanted columns that are there. ValueError: one is missing or there twice."""
    wanted = list(dict.fromkeys(column_of(present, key) for key in wanted))
    for key in wanted:
        if present.count(key) > 1:
            raise ValueError(f"{path}: column {key!r} occurs {present.count(key)} times")
    for key in required:
        if column_of(present, key) not in present:
            raise ValueError(f"{path}: missing column {key!r}; the columns are {listed(present)}")
    return [key for key in wanted if key in present]
