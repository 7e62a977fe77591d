"""Rows of JSONL and parquet files, with every mistake located: file, and line or row number.

Invariant: what `read_records` returns is non-empty, and every required column of every row is a
non-empty string.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".parquet")


def read_records(
    path: Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    choices: Mapping[str, Collection[str]] | None = None,
) -> list[dict[str, str | None]]:
    """The named columns of `path`, one dict a row; other columns are ignored.

    choices: required columns and the values they may have. An optional column may be missing or
    null (None here) and numbers in it become text. Blank JSONL lines are skipped. Raises ValueError
    naming the file and, where it applies, the line (JSONL) or row (parquet), both counted from 1.
    """
    if not path.is_file():
        raise ValueError(f"data file not found: {path}")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: data files end with {' or '.join(SUFFIXES)}")
    columns = [*required, *(choices or {}), *optional]
    rows = _jsonl(path) if path.suffix == ".jsonl" else _parquet(path, columns)
    records = [
        {key: _required(row, key, where) for key in required}
        | {key: _chosen(row, key, where, allowed) for key, allowed in (choices or {}).items()}
        | {key: _optional(row, key, where) for key in optional}
        for where, row in rows
    ]
    if not records:
        raise ValueError(f"{path} holds no rows")
    return records


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 ({error.reason})") from None
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: malformed JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: must be a JSON object, got {type(row).__name__}")
            yield where, row


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        present = set(parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=[key for key in columns if key in present])
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a readable parquet file ({reason})") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path} row {number}", row


def _required(row: dict[str, Any], key: str, where: str) -> str:
    if key not in row:
        raise ValueError(f"{where}: missing column {key!r}")
    if not isinstance(row[key], str):
        raise ValueError(f"{where}: {key!r} must be a string, got {type(row[key]).__name__}")
    if not row[key]:
        raise ValueError(f"{where}: {key!r} is empty")
    try:
        row[key].encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
        raise ValueError(f"{where}: {key!r} is no valid Unicode ({error.reason})") from None
    return row[key]


def _chosen(row: dict[str, Any], key: str, where: str, allowed: Collection[str]) -> str:
    value = _required(row, key, where)
    if value not in allowed:
        names = ", ".join(sorted(allowed))
        raise ValueError(f"{where}: {key!r} must be one of {names}, got {value!r}")
    return value


def _optional(row: dict[str, Any], key: str, where: str) -> str | None:
    value = row.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{where}: {key!r} must be a string or number, got {type(value).__name__}")
