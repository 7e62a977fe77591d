"""Makes what plays trajectories out of section `environment` of a configuration."""

from __future__ import annotations

from megatron_opd.config.environment import AgentConfig, EnvironmentConfig, EnvironmentSection
from megatron_opd.environments.agent.hosting import AgentHost
from megatron_opd.environments.agent.recorder import Student
from megatron_opd.environments.call_format import call_format
from megatron_opd.environments.guarded import EnvironmentLimits
from megatron_opd.environments.hosted import EnvironmentHost
from megatron_opd.environments.play import Player
from megatron_opd.environments.trajectory import trajectory_limits
from megatron_opd.environments.turns import TurnEncoder


def agent_host(config: AgentConfig) -> AgentHost:
    """Return what starts the agents of a run."""
    limits = EnvironmentLimits(config.timeout_s, config.message_bytes)
    return AgentHost(
        config.function, config.arguments, config.interpreter, limits, config.memory_bytes
    )


def agent_student(config: AgentConfig, encoder: TurnEncoder, max_new_tokens: int) -> Student:
    """Return what reads and writes the turns that agents ask for."""
    try:
        form = call_format(encoder, config.tool_format)
    except ValueError as error:
        form = str(error)  # only a call with tools needs it
    limits = trajectory_limits(config, max_new_tokens)
    return Student(encoder, form, limits, config.history)


def environment_host(config: EnvironmentConfig) -> EnvironmentHost:
    """Return what starts the environments of a run."""
    limits = EnvironmentLimits(config.timeout_s, config.message_bytes)
    return EnvironmentHost(config.type, config.options, limits, config.memory_bytes)


def player(
    config: EnvironmentSection, encoder: TurnEncoder, max_new_tokens: int, *, tools: bool
) -> Player:
    """Return what plays trajectories; tools: the environment has some.

    ValueError: it is not known how the student writes calls of them.
    """
    template = call_format(encoder, config.tool_format) if tools else None
    return Player(encoder, template, trajectory_limits(config, max_new_tokens), config.history)
