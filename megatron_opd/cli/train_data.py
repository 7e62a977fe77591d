"""Makes the stream of training prompts, and says what a user should know about it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.train_shape import Begun, Shape, first_shape, joined, shape_after
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.data.prompts import PromptSet
from megatron_opd.data.stream import PromptSource, Source


def sources_of(
    config: Config, train: Sequence[PromptSet], shape: Shape | None = None
) -> list[Source]:
    """Return what prompts are drawn from: each file with a weight, or all files as one.

    shape: of a run that went on with more or other prompts; None: it begins.
    """
    files, shape = config.data.train, shape or first_shape(config, train)
    if files[0].weight is None:
        name = ", ".join(str(file.path) for file in files)
        sizes = tuple(sum(counts) for counts in shape.prompts)
        return [Source(name, joined(train, shape), 1.0, shape.epochs[0], sizes)]
    sizes = zip(*shape.prompts, strict=True)
    return [
        Source(str(file.path), each.prompts, file.weight or 1.0, epochs, own)
        for file, each, epochs, own in zip(files, train, shape.epochs, sizes, strict=True)
    ]


def prompt_source(
    config: Config, train: Sequence[PromptSet], shape: Shape | None = None
) -> PromptSource:
    """Return the stream of training prompts from its begin, each considered when its turn comes."""
    return PromptSource(
        sources_of(config, train, shape),
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        group_size=config.rollout.group_size,
        epochs=config.data.epochs,
    )


def going_on(
    config: Config, train: Sequence[PromptSet], begun: Begun | None
) -> tuple[Shape | None, ControllerState, list[str]]:
    """Return shape and state from which a run takes prompts, and lines on what has changed.

    begun: what it goes on from. The shape is None where not all of the data was read. UserError:
    the data has changed, and nobody accepted that.
    """
    if not train or not all(each.whole and each.prompts for each in train):
        return None, NOTHING_YET, []
    if begun is None:
        return first_shape(config, train), NOTHING_YET, []
    source, curriculum = prompt_source(config, train), begun.state.curriculum
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
    source, curriculum = prompt_source(config, train, shape), config.data.curriculum
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
    if not all(each.whole and each.prompts for each in train):
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
    if epochs is None or not train or not all(each.whole and each.prompts for each in train):
        return []
    updates = prompt_source(config, train, shape).available(steps * batch) // batch
    if updates == steps:
        return []
    return [
        f"data.train lasts for {updates} updates with data.epochs {epochs}: the run ends there, "
        f"before run.max_steps {steps}, which the learning rate's decay goes by"
    ]


def used_up(config: Config, updates: int) -> list[str]:
    """Return a line if a run that has ended after `updates` updates had no more prompts."""
    if updates >= config.run.max_steps:
        return []
    return [f"data.train is used up after {updates} updates: data.epochs {config.data.epochs}"]


def seen_problems(train: Sequence[PromptSet], key: str, heldout: PromptSet) -> list[str]:
    """Return a line if held-out problems are trained on: their accuracy then says little.

    key: of the held-out set, below `data`.
    """
    if not train:
        return []
    trained = {prompt.text for each in train for prompt in each.prompts}
    both = sum(prompt.text in trained for prompt in heldout.prompts)
    if both == 0:
        return []
    files = ", ".join(str(each.path) for each in train)
    return [
        f"{both} of {len(heldout.prompts)} prompts of data.{key} {heldout.path} are in "
        f"data.train {files} too: their accuracy is that of problems trained on"
    ]
