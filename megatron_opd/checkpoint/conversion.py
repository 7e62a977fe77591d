"""Runs a conversion in either direction: units over ranks, resumption, checksums, final name.

A unit is a file of the target. Ranks take units in turn; a unit that an earlier run finished is
kept. The target gets its name only after every tensor was read back from it and its checksum found
equal to that of what was written.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.digest import entry_of
from megatron_opd.checkpoint.part_dir import PartDir
from megatron_opd.models.families.keys import Key, row_of
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import hf_shapes

# Checksums of the Hugging Face tensors, beside a Megatron checkpoint that was made of them.
CHECKSUMS = "tensors.json"

Record = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class ConversionReport:
    """Reports what a conversion did.

    units_kept: units of an earlier run. peak_rss_bytes: of this rank. padding_rows: of the source's
    embedding, beyond the vocabulary, which were not written. notes: what the user should know.
    """

    target: str
    tensor_bytes: int
    units: int
    units_kept: int
    convert_s: float
    verify_s: float
    peak_rss_bytes: int
    padding_rows: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConversionJob:
    """Describes one direction of a conversion. sizes: bytes of every unit.

    write: makes a unit and returns its record, whose `tensors` are {name: entry_of(tensor)}.
    finish: completes the directory from all records, in order. read_back: the tensors of a unit as
    they now stand in the directory.
    """

    part: PartDir
    sizes: tuple[int, ...]
    write: Callable[[int], Record]
    finish: Callable[[list[Record]], None]
    read_back: Callable[[int, Record], Iterable[tuple[str, torch.Tensor]]]


def run(job: ConversionJob, crew: Crew) -> ConversionReport:
    """Do the conversion, or what is left of it. ValueError, on every rank: see Crew.step."""
    started, part = time.perf_counter(), job.part
    crew.step(part.open, root_only=True)
    todo = [unit for unit in range(len(job.sizes)) if part.record(unit) is None]
    crew.step(lambda: part.need_space(sum(job.sizes[unit] for unit in todo)))
    mine = range(crew.rank, len(job.sizes), crew.size)
    waiting = set(todo)

    def convert() -> None:
        for unit in mine:
            if unit in waiting:
                part.done(unit, job.write(unit))

    def complete() -> None:
        job.finish([_known(part, unit) for unit in range(len(job.sizes))])

    def verify() -> None:
        for unit in mine:
            record = _known(part, unit)
            for name, tensor in job.read_back(unit, record):
                require_same(name, tensor, record["tensors"][name], part.path)

    crew.step(convert)
    crew.step(complete, root_only=True)
    written = time.perf_counter()
    crew.step(verify)
    crew.step(part.publish, root_only=True)
    return ConversionReport(
        target=str(part.target),
        tensor_bytes=sum(job.sizes),
        units=len(job.sizes),
        units_kept=len(job.sizes) - len(todo),
        convert_s=written - started,
        verify_s=time.perf_counter() - written,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _known(part: PartDir, unit: int) -> Record:
    record = part.record(unit)
    assert record is not None, f"unit {unit} is not done"
    return record


def require_same(name: str, tensor: torch.Tensor, expected: dict[str, str], where: Path) -> None:
    """Raise ValueError when the tensor is not the one that `expected` was made of."""
    found = entry_of(tensor)
    if found != expected:
        raise ValueError(
            f"{where}: tensor {name} is damaged: its checksum must be {expected['digest']} "
            f"({expected['dtype']}), got {found['digest']} ({found['dtype']})"
        )


def grouped(
    keys: Iterable[Item], sizes: Iterable[int], homes: Iterable[int], limit: int
) -> Iterator[tuple[Item, ...]]:
    """Group parameters into units of at most `limit` bytes or one larger one, each of one home."""
    held: dict[int, tuple[list[Item], int]] = {}
    for key, size, home in zip(keys, sizes, homes, strict=True):
        unit, total = held.get(home, ([], 0))
        if unit and total + size > limit:
            yield tuple(unit)
            unit, total = [], 0
        held[home] = [*unit, key], total + size
    yield from (tuple(unit) for unit, _ in held.values() if unit)


def cast_to(spec: ModelSpec, key: Key, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return what a parameter is cast to; None: it keeps its dtype, as a buffer always does."""
    return None if row_of(spec.family, key).buffer else dtype


def bytes_of(spec: ModelSpec, key: Key, dtype: torch.dtype) -> int:
    """Count the bytes of a parameter, without padding."""
    return sum(prod(shape) for shape in hf_shapes(spec, key).values()) * dtype.itemsize


def plan_of(source: Path, dtype: torch.dtype | None, **options: object) -> dict[str, Any]:
    """Return what tells conversions apart: the source's files as they are, and the options."""
    files = sorted(path for path in source.iterdir() if path.is_file())
    return {
        "source": str(source.resolve()),
        "files": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files],
        "dtype": str(dtype),
        **options,
    }
