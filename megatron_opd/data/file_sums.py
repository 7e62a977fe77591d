"""Tells files of prompts to which rows were added from files that were changed.

Invariant: a file counts as added to only if its old bytes, whole lines, are still its beginning;
files that came after the others of a folder or pattern were added too. Names do not count.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from megatron_opd.data.files import called, files_of, is_source
from megatron_opd.data.lines import CHUNK_BYTES
from megatron_opd.data.shards import CSV, LINES, VALUES, kind_of


class FilePart(msgspec.Struct, frozen=True):
    """Holds the size and checksum of one file, or of what a user's function gives.

    size: bytes, or rows of a function.
    """

    size: int
    crc32: int


class FileDifference(StrEnum):
    """Says what became of a data path."""

    NONE = "none"
    GROWN = "grown"
    CHANGED = "changed"


_GRAVITY = list(FileDifference).index


def sums_of(
    path: Path, old: Sequence[FilePart] = ()
) -> tuple[tuple[FilePart, ...], FileDifference]:
    """Return the files of a data path, and how they differ from what they were. Reads all of them.

    ValueError: there are none, or a user's function fails.
    """
    paths = [path] if is_source(path) else files_of(path)
    sums: list[FilePart] = []
    found = FileDifference.NONE if len(paths) >= len(old) else FileDifference.CHANGED
    for number, each in enumerate(paths):
        before = old[number] if number < len(old) else None
        own, same = _summed(each, before)
        sums.append(own)
        if before is None or (same and before.size < own.size):
            last = number >= len(old) - 1
            found = max(
                found, FileDifference.GROWN if last else FileDifference.CHANGED, key=_GRAVITY
            )
        elif not same:
            found = FileDifference.CHANGED
    return tuple(sums), found


def _summed(path: Path, before: FilePart | None) -> tuple[FilePart, bool]:
    """Return the sum of a file, and whether what it was is still its beginning."""
    return _rows_sum(path, before) if is_source(path) else _bytes_sum(path, before)


def _rows_sum(path: Path, before: FilePart | None) -> tuple[FilePart, bool]:
    crc, size, same = 0, 0, before == FilePart(0, 0)
    for size, row in enumerate(called(path), start=1):
        crc = zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode(), crc)
        same = same or before == FilePart(size, crc)
    return FilePart(size, crc), same


def _bytes_sum(path: Path, before: FilePart | None) -> tuple[FilePart, bool]:
    with path.open("rb") as file:
        old = before.size if before is not None else 0
        crc, last, left = 0, b"\n", old
        while left and (chunk := file.read(min(left, CHUNK_BYTES))):
            crc, last, left = zlib.crc32(chunk, crc), chunk[-1:], left - len(chunk)
        size, same = old - left, left == 0 and before == FilePart(old, crc)
        chunk = file.read(CHUNK_BYTES)
        if chunk:
            same = same and _takes_rows(path, last, chunk)
        while chunk:
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
            chunk = file.read(CHUNK_BYTES)
    return FilePart(size, crc), same


def _takes_rows(path: Path, last: bytes, added: bytes) -> bool:
    """Return whether what is added to a file is rows of its own: it begins with a line."""
    kind = kind_of(path)
    if kind is None or kind.packing is not None or kind.name not in (LINES, VALUES, CSV):
        return False
    return last == b"\n" or added.startswith((b"\n", b"\r\n"))
