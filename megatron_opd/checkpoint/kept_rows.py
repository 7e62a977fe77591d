"""Cuts a file of rows back to the first updates of a run, a row at a time: it may be gigabytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_opd.checkpoint.part_dir import sync_directory
from megatron_opd.errors import UserError


class _Row(msgspec.Struct, frozen=True):
    update: int


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Holds the rows that stay, beside the file that `replace` gives them."""

    path: Path
    part: Path | None

    def replace(self) -> None:
        """Cut the file; nothing happens where there is none."""
        if self.part is not None:
            self.part.rename(self.path)
            sync_directory(self.path.parent)


def rows_before(path: Path, updates: int) -> KeptRows:
    """Copy the complete rows of the first `updates` updates; the file stays as it is.

    May raise OSError; UserError: a line is no row.
    """
    if not path.exists():
        return KeptRows(path, None)
    part = path.with_name(f".{path.name}.part")
    decoder = msgspec.json.Decoder(_Row)
    with path.open("rb") as rows, part.open("wb") as kept:
        for number, row in enumerate(rows, 1):
            if not row.endswith(b"\n"):
                break  # cut short when the run was killed
            try:
                update = decoder.decode(row).update
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                update = -1
            if update < 0:
                raise UserError(f"{path}:{number} is damaged: not a row of {path.stem}")
            if update < updates:
                kept.write(row)
        kept.flush()
        os.fsync(kept.fileno())
    return KeptRows(path, part)
