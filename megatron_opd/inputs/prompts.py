"""Makes the stream of training prompts, and says what a user should know about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_opd.config.evaluation import ONLY_SET
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.data.drawn import DrawnPrompts
from megatron_opd.data.epochs import Stretch
from megatron_opd.data.file_sums import FileDifference
from megatron_opd.data.prompts import PromptSet
from megatron_opd.data.stream import MixedSource, PromptSource
from megatron_opd.errors import UserError
from megatron_opd.inputs.kept_data import Begun, Shape
from megatron_opd.inputs.prompt_order import (
    drawn_of,
    first_shape,
    joined,
    reads_by_row,
    shape_after,
)
from megatron_opd.records.types import Prompt

OPTIONAL_KEYS = (
    "max_new_tokens_key",
    "stop_key",
    "teacher_prompt_key",
    "task_key",
    "reward_weight_key",
    "teacher_weight_key",
)
"""Keys of data that name columns which a row may lack, but not every row."""


def sources_of(
    config: Config, train: Sequence[PromptSet], shape: Shape | None = None
) -> list[MixedSource]:
    """Return what prompts are drawn from: each file with a weight, or all files as one.

    shape: of a run that went on with more or other prompts; None: it begins.
    """
    files, shape = config.data.train, shape or first_shape(config, train)
    if files[0].weight is None:
        name = ", ".join(str(file.path) for file in files)
        sizes = tuple(sum(counts) for counts in shape.prompts)
        return [_source(name, joined(train, shape), 1.0, shape.epochs[0], sizes)]
    sizes = zip(*shape.prompts, strict=True)
    prompts = [
        drawn_of([(each, 0, len(each.prompts))]) if each.drawn is not None else each.examples
        for each in train
    ]
    return [
        _source(str(file.path), each, file.weight or 1.0, epochs, own)
        for file, each, epochs, own in zip(files, prompts, shape.epochs, sizes, strict=True)
    ]


def _source(
    name: str,
    prompts: DrawnPrompts | tuple[Prompt, ...],
    weight: float,
    epochs: tuple[Stretch, ...],
    sizes: tuple[int, ...],
) -> MixedSource:
    expect = prompts.expect if isinstance(prompts, DrawnPrompts) else None
    return MixedSource(name, prompts, weight, epochs, sizes, expect)


def prompt_source(
    config: Config,
    train: Sequence[PromptSet],
    shape: Shape | None = None,
    passed: Sequence[Sequence[int]] = (),
) -> PromptSource:
    """Return the stream of training prompts from its begin, each considered when its turn comes.

    passed: see PromptSource.
    """
    return PromptSource(
        sources_of(config, train, shape),
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        group_size=config.rollout.group_size,
        epochs=config.data.epochs,
        passed=passed,
    )


def by_row(begun: Begun | None) -> bool | None:
    """Return whether rows are read when they are drawn, as before; None: their size decides.

    A file that has grown since the run began is still read as it was.
    """
    if begun is None or FileDifference.CHANGED in begun.differences:
        return None
    return begun.kept.shape.by_row


def going_on(
    config: Config, train: Sequence[PromptSet], begun: Begun | None
) -> tuple[Shape | None, ControllerState, list[str]]:
    """Return shape and state from which a run takes prompts, and lines on what has changed.

    begun: what it goes on from. The shape is None where not all of the data was read. UserError:
    the data has changed, and nobody accepted that.
    """
    if not train or not all(each.counted for each in train):
        return None, NOTHING_YET, []
    if begun is None:
        return first_shape(config, train), NOTHING_YET, []
    weights = tuple(file.weight for file in config.data.train)
    passed = begun.state.passed if weights == begun.kept.shape.weights else ()
    source, curriculum = prompt_source(config, train, passed=passed), begun.state.curriculum
    if config.data.curriculum is None or curriculum is None:
        drawn = source.drawn_at(begun.state.next_uid)
    else:
        drawn = source.alone().drawn_at(curriculum.looked_at)
    return shape_after(config, train, begun, drawn)


def chosen_source(
    config: Config, train: Sequence[PromptSet], state: ControllerState, shape: Shape | None = None
) -> PromptSource | CurriculumSource:
    """Return the stream of prompts that a run takes, from a controller's state on.

    ValueError: the state is of other problems.
    """
    source = prompt_source(config, train, shape, state.passed)
    curriculum = config.data.curriculum
    if curriculum is None:
        return source_at(source, state)
    problems = sum(len(each.prompts) for each in train)
    size, seed = config.rollout.group_size, config.run.seed
    chosen = CurriculumSource(source.alone(), problems, curriculum, seed=seed, group_size=size)
    return source_at(chosen, state)


def source_at(
    source: PromptSource | CurriculumSource, state: ControllerState
) -> PromptSource | CurriculumSource:
    """Return the source of the same prompts that continues from a controller's state.

    ValueError: the state is of other problems.
    """
    group, member = divmod(state.next_uid, source.group_size)
    of_group = (each.asked for each in state.line if each.uid // source.group_size == group)
    held = next(of_group, None) if member else None
    if isinstance(source, CurriculumSource):
        return source.at(state.next_uid, state.curriculum, held)
    return source.at(state.next_uid, held)


def check_enough(config: Config, train: Sequence[PromptSet], shape: Shape | None = None) -> None:
    """Check that the data fills a batch, and a fixed distance. Raises UserError."""
    if not all(each.counted for each in train):
        return
    schedule, batch = config.schedule, config.buffer.batch_size
    there = prompt_source(config, train, shape).available(batch)
    if there < batch:
        raise UserError(
            f"data.train has prompts for {there} responses with data.epochs {config.data.epochs}, "
            f"but buffer.batch_size is {batch}: no batch would be full; raise data.epochs"
        )
    if schedule.type not in ("step_off", "controlled"):
        return
    permits = schedule.permits(batch)
    there = sum(len(each.prompts) for each in train) * config.rollout.group_size
    if permits > there:
        raise UserError(
            f"schedule.max_staleness {schedule.max_staleness:g} with type {schedule.type} keeps "
            f"{permits} responses in flight, but data.train has prompts for {there}; lower it, or "
            "buffer.batch_size"
        )


def lasting(config: Config, train: Sequence[PromptSet], shape: Shape | None = None) -> list[str]:
    """Return a line if data.epochs ends the run before run.max_steps does."""
    epochs, steps, batch = config.data.epochs, config.run.max_steps, config.buffer.batch_size
    if epochs is None or not train or not all(each.counted for each in train):
        return []
    updates = prompt_source(config, train, shape).available(steps * batch) // batch
    if updates == steps:
        return []
    most = "at most " if reads_by_row(train) else ""
    return [
        f"data.train lasts for {most}{updates} updates with data.epochs {epochs}: the run ends "
        f"there, before run.max_steps {steps}, which the learning rate's decay goes by"
    ]


def used_up(config: Config, updates: int) -> list[str]:
    """Return a line if a run that has ended after `updates` updates had no more prompts."""
    if updates >= config.run.max_steps:
        return []
    return [f"data.train is used up after {updates} updates: data.epochs {config.data.epochs}"]


def seen_problems(
    train: Sequence[PromptSet], key: str, path: Path, heldout: Sequence[Prompt]
) -> list[str]:
    """Return a line if held-out problems are trained on: their accuracy then says little.

    Of data whose rows are read when they are drawn, those are looked at that were read so far.
    key: of the held-out set, below `data`.
    """
    met = set[str]().union(*(each.tally.met for each in train))
    both = sum(prompt.text in met for prompt in heldout)
    if both == 0:
        return []
    files = ", ".join(str(each.path) for each in train)
    return [
        f"{both} of {len(heldout)} prompts of data.{key} {path} are in data.train {files} too: "
        "their accuracy is that of problems trained on"
    ]


def unseen_keys(config: Config, train: Sequence[PromptSet]) -> list[str]:
    """Return a line for each key that names a column which no row that was read has.

    UserError: all rows were read.
    """
    unseen = frozenset.intersection(*(frozenset(each.tally.unseen) for each in train))
    whole = all(each.whole for each in train)
    rows, lines = sum(each.tally.rows for each in train), list[str]()
    named = [(f"data.{key}", getattr(config.data, key), "it null") for key in OPTIONAL_KEYS]
    passed_on = () if config.environment is None else config.environment.columns
    named += [("environment.columns", name, "it out") for name in passed_on]
    for key, name, remedy in named:
        if name not in unseen:
            continue
        if whole:
            raise UserError(
                f"{key} must name a column of data.train, got {name!r}, which no row has; "
                f"leave {remedy}"
            )
        if reads_by_row(train):
            lines.append(f"{key}: none of the {rows} rows read so far has {name!r}")
    return lines


def unhinted_notes(config: Config, train: Sequence[PromptSet]) -> list[str]:
    """Return a line for each file of which some rows lack what their teacher would read."""
    key = config.data.teacher_prompt_key
    return [
        f"data.teacher_prompt_key: {each.tally.unhinted} of {each.tally.rows} rows of {each.path} "
        f"have no {key!r}, first {each.tally.unhinted_at}: their teacher reads the student's "
        "prompt; to leave them out set data.without_teacher_prompt to skip"
        for each in train
        if each.tally.unhinted
    ]


def drawn_notes(train: Sequence[PromptSet]) -> list[str]:
    """Return a line for each file whose rows are read when they are drawn."""
    return [
        f"data.train {each.path}: {each.drawn.num_bytes / 1e9:.2g} GB of rows are read when they "
        f"are drawn; {each.tally.rows} of {len(each.prompts)} rows were judged"
        + ("" if each.whole else ", opd check --data judges all")
        for each in train
        if each.drawn is not None
    ]


def skipped_lines(sets: Iterable[PromptSet]) -> list[str]:
    """Return what rows are not used, a line for each file."""
    return [line for each in sets if (line := each.tally.skipped_line) is not None]


def drawn_lines(
    config: Config, train: Sequence[PromptSet], heldout: Mapping[str, Sequence[Prompt]]
) -> list[str]:
    """Return what the rows that were read when they were drawn have shown."""
    drawn = [each for each in train if each.drawn is not None]
    lines = skipped_lines(drawn)
    for name, problems in heldout.items():
        path = config.data.heldout[name].file
        lines += seen_problems(drawn, key_of_set(config, name), path, problems)
    return lines


def key_of_set(config: Config, name: str) -> str:
    """Return the key of a held-out set below `data`: heldout, or heldout.NAME."""
    return "heldout" if list(config.data.heldout) == [ONLY_SET] else f"heldout.{name}"
