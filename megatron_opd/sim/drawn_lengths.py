"""Says how long what a configuration's run samples is, from its sections or a recorded run."""

from __future__ import annotations

from dataclasses import replace

from megatron_opd.config.schema import Config
from megatron_opd.environments.trajectory import TrajectoryLimits, trajectory_limits
from megatron_opd.errors import UserError
from megatron_opd.sim.costs import Lengths, LognormalLengths, LognormalTurns, RecordedLengths
from megatron_opd.sim.lengths import LengthDraws


def drawn_lengths(config: Config) -> LognormalLengths:
    """Return the distribution that config.simulation.lengths describes, and that of turns."""
    section, own, limits = config.simulation.lengths, config.simulation.turns, limits_of(config)
    longest, turns = config.rollout.max_new_tokens, None
    if limits is not None:
        longest = limits.max_turn_tokens
        turns = LognormalTurns(
            mean=own.mean or max(1.0, limits.max_turns / 2),
            cv=own.cv,
            given_tokens=own.given_tokens,
            answer_s=own.answer_s,
            answer_cv=own.answer_cv,
        )
    return LognormalLengths(
        mean=section.mean or longest / 2,
        cv=section.cv,
        prompt_tokens=section.prompt_tokens,
        turns=turns,
    )


def mean_tokens(lengths: LognormalLengths) -> float:
    """Return the given and sampled tokens of the average sample, where no limit cuts it."""
    turns = lengths.turns
    if turns is None:
        return lengths.prompt_tokens + lengths.mean
    given = lengths.prompt_tokens + (turns.mean - 1) * turns.given_tokens
    return given + turns.mean * lengths.mean


def limits_of(config: Config) -> TrajectoryLimits | None:
    """Return what limits the trajectories of a run; None without an environment."""
    most = config.rollout.max_new_tokens
    if config.environment is None:
        return None
    limits = trajectory_limits(config.environment, most)
    return replace(limits, max_turn_tokens=min(limits.max_turn_tokens, most))


def draws_of(config: Config, lengths: Lengths) -> LengthDraws:
    """Return what draws the lengths of a run, up to its limits."""
    limits, seed = limits_of(config), config.simulation.seed
    if limits is None:
        return LengthDraws(lengths, config.rollout.max_new_tokens, seed)
    return LengthDraws(lengths, limits.max_turn_tokens, seed, limits.max_turns)


def check_lengths(config: Config, lengths: Lengths) -> None:
    """Check that recorded lengths are of a run of this kind. UserError: of the other one."""
    if not isinstance(lengths, RecordedLengths):
        return
    if (config.environment is None) == bool(lengths.trajectories):
        kind, other = "with section environment", "without section environment"
        if config.environment is None:
            kind, other = other, kind
        raise UserError(
            f"recorded lengths must be those of a run {kind} like this one, got a run {other}; "
            "take another run, or describe lengths in simulation.lengths"
        )
