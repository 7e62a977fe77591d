"""Defines what a checkpoint knows of the training data, and compares it with what is there now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data.epochs import Stretch
from megatron_opd.data.file_sums import FileDifference, FilePart, sums_of

TRAIN_KEY = "data.train"
COST = "prompts of the epoch under way may then be drawn twice or never, and pass rates begin anew"


class Shape(msgspec.Struct, frozen=True):
    """Says how many prompts the files of data.train have.

    weights: of the files. prompts: of each file, when the run began and after every time that some
    were added. epochs: of each source that prompts are drawn from. by_row: whether every row counts
    as a prompt, because rows are read when they are drawn.
    """

    weights: tuple[float | None, ...]
    prompts: tuple[tuple[int, ...], ...]
    epochs: tuple[tuple[Stretch, ...], ...]
    by_row: bool = False


class KeptData(msgspec.Struct, frozen=True):
    """Holds what a checkpoint knows of data.train. sums: of the files of each of its paths."""

    sums: tuple[tuple[FilePart, ...], ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Begun:
    """Holds what a run goes on from.

    state: of the controller. kept: of the data at the checkpoint. sums, differences: of each path
    of data.train now. accepted: whether the user takes any change.
    """

    state: ControllerState
    kept: KeptData
    sums: tuple[tuple[FilePart, ...], ...]
    differences: tuple[FileDifference, ...]
    accepted: bool


def data_now(config: Config) -> tuple[tuple[FilePart, ...], ...]:
    """Return the sums of the files of data.train. ValueError: they cannot be read."""
    return tuple(sums_of(file.path)[0] for file in config.data.train)


def read_kept(found: Any) -> KeptData:
    """Read what a checkpoint knows of data.train. ValueError: it is damaged."""
    try:
        kept = msgspec.convert(found, KeptData)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    shape, files = kept.shape, len(kept.sums)
    sources = 1 if None in shape.weights else files
    sound = (
        len(shape.weights) == files > 0
        and len(shape.prompts) > 0
        and all(len(counts) == files and min(counts) >= 0 for counts in shape.prompts)
        and all(
            old <= new for pair in pairwise(shape.prompts) for old, new in zip(*pair, strict=True)
        )
        and len(shape.epochs) == sources
        and all(own and own[0].epoch == 0 and _rising(own) for own in shape.epochs)
    )
    if not sound:
        raise ValueError("counts of training prompts that cannot be")
    return kept


def _rising(epochs: Sequence[Stretch]) -> bool:
    positive = all(each.prompts > 0 and each.begins >= 0 for each in epochs)
    return positive and all(a.epoch < b.epoch and a.begins <= b.begins for a, b in pairwise(epochs))


def compared(
    config: Config, kept: KeptData
) -> tuple[tuple[tuple[FilePart, ...], ...], tuple[FileDifference, ...]]:
    """Return the sums of data.train now, and how each file differs from what was kept.

    Other files than those of the checkpoint count as changed. ValueError: they cannot be read.
    """
    files = config.data.train
    if len(files) != len(kept.sums):
        return data_now(config), (FileDifference.CHANGED,) * len(files)
    found = [sums_of(file.path, old) for file, old in zip(files, kept.sums, strict=True)]
    return tuple(sums for sums, _ in found), tuple(each for _, each in found)
