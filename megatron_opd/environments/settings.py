"""Makes what plays trajectories out of section `environment` of a configuration."""

from __future__ import annotations

from megatron_opd.config.environment import EnvironmentConfig, EnvironmentSection
from megatron_opd.environments.call_format import call_format
from megatron_opd.environments.guarded import EnvironmentLimits
from megatron_opd.environments.hosted import EnvironmentHost
from megatron_opd.environments.play import Player
from megatron_opd.environments.trajectory import TrajectoryLimits
from megatron_opd.environments.turns import TurnEncoder


def environment_host(config: EnvironmentConfig) -> EnvironmentHost:
    """Return what starts the environments of a run."""
    limits = EnvironmentLimits(config.timeout_s, config.message_bytes)
    return EnvironmentHost(config.type, config.options, limits, config.memory_bytes)


def trajectory_limits(config: EnvironmentSection, max_new_tokens: int) -> TrajectoryLimits:
    """Return the limits of a trajectory; max_new_tokens: of a turn, where the section has none."""
    return TrajectoryLimits(
        config.max_turns,
        config.max_tokens,
        min(config.max_turn_tokens or max_new_tokens, config.max_tokens),
        config.max_sequences,
    )


def player(
    config: EnvironmentSection, encoder: TurnEncoder, max_new_tokens: int, *, tools: bool
) -> Player:
    """Return what plays trajectories; tools: the environment has some.

    ValueError: it is not known how the student writes calls of them.
    """
    template = call_format(encoder, config.tool_format) if tools else None
    return Player(encoder, template, trajectory_limits(config, max_new_tokens), config.history)
