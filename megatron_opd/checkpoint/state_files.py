"""Sums the files that one learner rank wrote, and verifies the checksums. Torch-free.

Invariant: `sums-RANK.json` exists only when every file it names is whole on disk, so that a
checkpoint is complete once each rank's is there.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.config.wording import line

CHUNK_BYTES = 1 << 24
MAX_NAME_BYTES, MAX_PATH = 255, 1024


@dataclass(frozen=True, slots=True)
class FileSum:
    """Describes a whole file. name: relative to the directory of the sums."""

    name: str
    size: int
    crc32: int


def sum_file(directory: Path, name: str) -> FileSum:
    """Return size and checksum of a file."""
    size = crc = 0
    with (directory / name).open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return FileSum(name, size, crc)


def write_sums(directory: Path, rank: int, names: Iterable[str]) -> None:
    """Write sums-RANK.json in one step."""
    sums = [sum_file(directory, name) for name in sorted(names)]
    rows = [[entry.name, entry.size, entry.crc32] for entry in sums]
    write_synced(directory / sums_name(rank), json.dumps(rows))


def sums_name(rank: int) -> str:
    """Return the name of a rank's checksums file."""
    return f"sums-{rank:05d}.json"


def read_sums(directory: Path, ranks: int) -> list[FileSum]:
    """Return what all ranks wrote, in an order that every reader agrees on.

    ValueError: a rank's checksums are missing or unreadable.
    """
    found: list[FileSum] = []
    for rank in range(ranks):
        path = directory / sums_name(rank)
        try:
            found += [_sum_of(row) for row in json.loads(path.read_bytes())]
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"checkpoint {directory}: cannot read {path.name}: {line(error)}"
            ) from None
    return sorted(found, key=lambda entry: entry.name)


def _sum_of(row: Any) -> FileSum:
    return file_sum(*row) if isinstance(row, list) and len(row) == 3 else file_sum(row, None, None)


def file_sum(name: Any, size: Any, crc32: Any) -> FileSum:
    """Read what a checkpoint says of one of its files.

    ValueError: not its own, or not a checksum.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    inside = len(parts) > 0 and parts[0] != "/" and ".." not in parts and name.isprintable()
    short = all(len(part.encode()) <= MAX_NAME_BYTES for part in parts) if inside else False
    if not (short and len(name) <= MAX_PATH and _is_count(size) and _is_count(crc32)):
        raise ValueError(
            f"not a file name in it, a size and a checksum: {line([name, size, crc32])}"
        )
    return FileSum(name, size, crc32)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def check_size(directory: Path, entry: FileSum) -> None:
    """Raise ValueError if the file is missing or was cut short."""
    path = directory / entry.name
    size = path.stat().st_size if path.is_file() else None
    if size != entry.size:
        got = "it is missing" if size is None else f"got {size}"
        raise ValueError(
            f"checkpoint {directory} is damaged: {entry.name} must have {entry.size} bytes, {got}"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint. ValueError: it is missing or unreadable."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint {path.parent}: cannot read {path.name}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"checkpoint {path.parent}: {path.name} must hold an object")
    return value  # pyright: ignore[reportUnknownVariableType]
