"""Keeps the order of training prompts when a run goes on with other data files than it began with.

Invariant: prompts that were added to a file change neither the numbers of the others nor an epoch
that has begun; what changes more than that was accepted by the user, and is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np

from megatron_opd.buffer.pass_rates import CurriculumState
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import ControllerState, GroupMember
from megatron_opd.data.drawn import DrawnPrompts
from megatron_opd.data.epochs import Epochs, Stretch
from megatron_opd.data.file_sums import FileDifference
from megatron_opd.data.prompts import PromptSet
from megatron_opd.errors import UserError
from megatron_opd.inputs.kept_data import COST, TRAIN_KEY, Begun, Shape
from megatron_opd.records.types import NO_ROW, Prompt, Rollout


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
    return GroupMember(prompt=prompt, turns=member.turns)
