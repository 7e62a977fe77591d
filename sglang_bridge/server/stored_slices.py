"""Finds what a version stores of a rank's weights, and reads it into memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sglang_bridge.server.pieces import Piece
from sglang_bridge.server.version_files import ANEW, BadVersion, VersionFile
from sglang_bridge.weights.changes import (
    BLOCK,
    COUNT_BYTES,
    OFFSET_BYTES,
    Changes,
    apply_changes,
    groups_of_blocks,
    num_blocks,
)
from sglang_bridge.weights.manifest import File, Manifest, Slice

Listed = tuple[File, Slice]


@dataclass(frozen=True, slots=True)
class Stored:
    """Describes what a version stores of a piece: where, and which rows of it the piece holds.

    rows: live memory, the dimension of the cut first. first: the slice's row that is its first.
    """

    file: File
    part: Slice
    first: int
    rows: torch.Tensor


def slices_by_name(manifest: Manifest, wanted: Collection[str]) -> dict[str, list[Listed]]:
    """Return what a version lists of the tensors `wanted`, each tensor's slices in order."""
    found: dict[str, list[Listed]] = defaultdict(list)
    for file in manifest.files:
        for part in file.slices:
            if part.name in wanted:
                found[part.name].append((file, part))
    return {name: sorted(each, key=lambda pair: pair[1].start) for name, each in found.items()}


def stored_of(
    piece: Piece, target: torch.Tensor, slices: Sequence[Listed], version: str
) -> Iterator[Stored]:
    """Yield the slices that a piece consists of, each with its memory in `target`.

    target: the piece's own memory or a shadow of it. BadVersion: they are cut otherwise, or do not
    cover the piece exactly once.
    """
    covered = end = None
    for file, part in slices:
        dim, start = part.dim, piece.start if part.dim == piece.dim else 0
        shape = list(target.shape)
        if dim == piece.dim < len(part.shape):
            shape[dim] = part.shape[dim]
        if tuple(shape) != part.shape:
            raise BadVersion(
                f"version {version} cuts dimension {dim} of {part.name} {list(part.shape)}, of "
                f"which this rank holds {list(target.shape)} of dimension {piece.dim}: {ANEW}"
            )
        end = start + target.shape[dim]
        covered = start if covered is None else covered
        low, high = max(start, part.start), min(end, part.start + part.length)
        if low >= high:
            continue
        if low != covered:
            covered = None
            break
        covered = high
        rows = target.narrow(dim, low - start, high - low).movedim(dim, 0)
        yield Stored(file, part, low - part.start, rows)
    if covered is None or covered != end:
        raise BadVersion(
            f"version {version} does not hold [{piece.start}:{piece.start + piece.length}] of "
            f"dimension {piece.dim} of {piece.hf_name} exactly once: {ANEW}"
        )


def fill(file: VersionFile, stored: Stored) -> None:
    """Read a stored slice into its memory. BadVersion: it is damaged."""
    part, rows, first = stored.part, stored.rows, stored.first
    if part.form == "changes":
        _fill_changes(file, stored)
    elif part.form == "whole":
        (array,) = part.arrays
        row_bytes = rows[0].numel() * rows.dtype.itemsize
        _require(file, part, (array.rows, array.row_bytes), (part.length, row_bytes))
        for row, data in file.rows(array, first, len(rows)):
            numbers = torch.frombuffer(data, dtype=rows.dtype).view(-1, *rows.shape[1:])
            rows[row - first : row - first + len(numbers)].copy_(numbers)


def _fill_changes(file: VersionFile, stored: Stored) -> None:
    part, rows, width = stored.part, stored.rows, stored.rows[0].numel()
    counts, offsets, values = part.arrays
    widths = (counts.row_bytes, offsets.row_bytes, values.row_bytes)
    _require(file, part, widths, (COUNT_BYTES, OFFSET_BYTES, rows.dtype.itemsize))
    _require(
        file, part, (counts.rows, values.rows), (num_blocks(part.length * width), offsets.rows)
    )
    begin = stored.first * width
    end = begin + rows.numel()
    changed = file.numbers(counts, torch.int32, 0, num_blocks(end))
    before = list(accumulate(changed.tolist(), initial=0))
    if int(changed.min()) < 0 or int(changed.max()) > BLOCK or before[-1] > offsets.rows:
        raise BadVersion(f"{file.path}: {part.name}: counts of changes cannot be so: {ANEW}")
    for block, last in groups_of_blocks(begin, end):
        at, count = before[block], before[last] - before[block]
        if count:
            found = Changes(
                changed[block:last],
                file.numbers(offsets, torch.uint16, at, count),
                file.numbers(values, rows.dtype, at, count),
            )
            apply_changes(rows, begin, block, found)


def _require(
    file: VersionFile, part: Slice, found: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if found != expected:
        raise BadVersion(
            f"{file.path}: {part.name}: arrays of {list(found)} rows or bytes instead of "
            f"{list(expected)}: {ANEW}"
        )
