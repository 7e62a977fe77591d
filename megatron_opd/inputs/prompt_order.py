"""Keeps the order of training prompts when a run goes on with other data files than it began with.

Invariant: prompts that were added to a file change neither the numbers of the others nor an epoch
that has begun; what changes more than that was accepted by the user, and is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from megatron_opd.buffer.pass_rates import CurriculumState
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import ControllerState, GroupMember
from megatron_opd.data.drawn import DrawnPrompts
from megatron_opd.data.epochs import Epochs, Stretch
from megatron_opd.data.file_sums import FileDifference, FilePart, sums_of
from megatron_opd.data.prompts import PromptSet
from megatron_opd.errors import UserError
from megatron_opd.records.types import NO_ROW, Prompt, Rollout

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


def first_shape(config: Config, train: Sequence[PromptSet]) -> Shape:
    """Return the shape of the data of a run that begins."""
    counts = tuple(len(each.prompts) for each in train)
    epochs = tuple((Stretch(0, 0, count),) for count in _of_sources(config, counts))
    return Shape(_weights(config), (counts,), epochs, reads_by_row(train))


def shape_after(
    config: Config, train: Sequence[PromptSet], begun: Begun, drawn: Sequence[int]
) -> tuple[Shape, ControllerState, list[str]]:
    """Return shape and state with which a run goes on, and lines for the user.

    drawn: prompts that were drawn from each source. UserError: the old rows of a file that has more
    of them have become other prompts.
    """
    old = begun.kept.shape
    counts = tuple(len(each.prompts) for each in train)
    weights, before, by_row = _weights(config), old.prompts[-1], reads_by_row(train)
    if len(before) != len(counts):
        before = counts  # nothing to compare with: all of them are other files
    if weights != old.weights and {*weights, *old.weights} != {None}:
        epochs = tuple(
            (Stretch(0, there, count),)
            for there, count in zip(drawn, _of_sources(config, counts), strict=True)
        )
        line = f"{TRAIN_KEY} has other files or weights: all of its epochs begin anew; {COST}"
        state = msgspec.structs.replace(_without_rates(begun.state, sum(counts)), passed=[])
        return Shape(weights, (counts,), epochs, by_row), state, [line]
    differences = [
        _difference(*each) for each in zip(begun.differences, before, counts, strict=True)
    ]
    changed = [
        file.path
        for file, each in zip(config.data.train, differences, strict=True)
        if each is FileDifference.CHANGED
    ]
    names = ", ".join(map(str, changed))
    if changed and not begun.accepted and FileDifference.GROWN in begun.differences:
        raise UserError(
            f"--resume: {TRAIN_KEY} {names} has more rows than at the checkpoint, but the old ones "
            f"are other prompts; to continue: --accept-changes {TRAIN_KEY} ({COST})"
        )
    epochs = tuple(
        _epochs(Epochs(own), difference, there, count)
        for own, difference, there, count in zip(
            old.epochs,
            _worst(config, differences),
            drawn,
            _of_sources(config, counts),
            strict=True,
        )
    )
    if changed:
        line = f"{TRAIN_KEY} {names} holds other prompts than at the checkpoint: {COST}"
        state = _without_rates(begun.state, sum(counts))
        return Shape(weights, (counts,), epochs, by_row), state, [line]
    if counts == before:
        return Shape(weights, old.prompts, epochs, by_row), begun.state, []
    lines = [
        f"{TRAIN_KEY} {file.path} has {now - then} more prompts than at the checkpoint: they join "
        "when its next epoch begins"
        for file, then, now in zip(config.data.train, before, counts, strict=True)
        if now > then
    ]
    return Shape(weights, (*old.prompts, counts), epochs, by_row), begun.state, lines


def joined(train: Sequence[PromptSet], shape: Shape) -> DrawnPrompts | tuple[Prompt, ...]:
    """Return the prompts of all files: those when the run began, then those that were added."""
    generations = pairwise(((0,) * len(train), *shape.prompts))
    parts = [
        (each, start, end)
        for starts, ends in generations
        for each, start, end in zip(train, starts, ends, strict=True)
    ]
    if shape.by_row:
        return drawn_of(parts)
    return tuple(prompt for each, start, end in parts for prompt in each.examples[start:end])


def drawn_of(parts: Iterable[tuple[PromptSet, int, int]]) -> DrawnPrompts:
    """Return prompts of files whose rows are read when they are drawn; parts: see DrawnPrompts."""
    rows = ((each.drawn, start, end) for each, start, end in parts)
    return DrawnPrompts((each, start, end) for each, start, end in rows if each is not None)


def reads_by_row(train: Sequence[PromptSet]) -> bool:
    """Return whether rows of the data are read when they are drawn."""
    return any(each.drawn is not None for each in train)


def _difference(files: FileDifference, before: int, now: int) -> FileDifference:
    """Return what became of the prompts of a path, by its files and their count."""
    if files is FileDifference.NONE and before != now:  # by another key, which was accepted
        return FileDifference.CHANGED
    return FileDifference.CHANGED if files is FileDifference.GROWN and now < before else files


def _epochs(
    epochs: Epochs, difference: FileDifference, drawn: int, prompts: int
) -> tuple[Stretch, ...]:
    if difference is FileDifference.NONE:
        return epochs.stretches
    change = epochs.grown if difference is FileDifference.GROWN else epochs.changed
    return change(drawn, prompts).stretches


def _weights(config: Config) -> tuple[float | None, ...]:
    return tuple(file.weight for file in config.data.train)


def _of_sources(config: Config, counts: Sequence[int]) -> list[int]:
    """Return the prompts of each source: of every file, or of all as one."""
    return [sum(counts)] if config.data.train[0].weight is None else list(counts)


def _worst(config: Config, differences: Sequence[FileDifference]) -> list[FileDifference]:
    if config.data.train[0].weight is not None:
        return list(differences)
    return [max(differences, key=list(FileDifference).index)]


def _without_rates(state: ControllerState, problems: int) -> ControllerState:
    """Return a state that knows nothing of the problems, and whose prompts are none of them."""
    old = state.curriculum
    if old is None:
        return state
    rates = CurriculumState(
        old.looked_at, old.skipped, np.zeros(problems), np.zeros(problems, np.int32), []
    )
    line = [_without_row(member) for member in state.line]
    return msgspec.structs.replace(state, curriculum=rates, line=line)


def _without_row(member: GroupMember) -> GroupMember:
    prompt = replace(member.asked, row=NO_ROW)
    if member.sample is not None:
        rollout: Rollout = replace(member.sample.rollout, prompt=prompt)
        return GroupMember(sample=replace(member.sample, rollout=rollout))
    if member.rollout is not None:
        return GroupMember(rollout=replace(member.rollout, prompt=prompt))
    return GroupMember(prompt=prompt)
