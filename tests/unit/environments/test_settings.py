"""Section `environment` becomes limits, hosts and players."""

import asyncio
from typing import get_args

import pytest
from pydantic import TypeAdapter

from megatron_opd.config.environment import EnvironmentConfig, ToolFormat
from megatron_opd.environments.call_format import call_format
from megatron_opd.environments.formats import FORMATS
from megatron_opd.environments.protocol import BUILT_IN, make_environment
from megatron_opd.environments.settings import environment_host, player
from megatron_opd.environments.trajectory import TrajectoryLimits, trajectory_limits
from tests.support.chat_families import BY_NAME

SECTION = TypeAdapter(EnvironmentConfig)
ROGUE = "tests.support.rogue_environments:RogueEnvironment"


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_is_made_with_its_options(name: str):
    config = SECTION.validate_python({"type": name})
    assert config.type == name
    make_environment(name, config.options)


def test_every_format_can_be_named():
    assert get_args(ToolFormat) == tuple(FORMATS)


def test_the_options_reach_the_environment():
    made = SECTION.validate_python({"type": "guess", "low": 3, "high": 3})
    assert made.options == {"low": 3, "high": 3, "guesses": 8}
    own = SECTION.validate_python({"type": ROGUE, "arguments": {"does": "raises"}})
    assert own.options == {"does": "raises"}

    async def run():
        async with environment_host(SECTION.validate_python({"type": "calculator"})) as host:
            return host.tools

    (tool,) = asyncio.run(run())
    assert tool["function"]["name"] == "calculate"


@pytest.mark.parametrize(
    ("section", "turn"),
    [
        ({}, 512),
        ({"max_turn_tokens": 9}, 9),
        ({"max_tokens": 100}, 100),
        ({"max_sampled_tokens": 70, "history": "branch"}, 70),
    ],
)
def test_a_turn_is_limited_by_the_section_or_the_rollouts(section, turn: int):
    config = SECTION.validate_python({"type": "guess", "max_turns": 3, **section})
    limits = trajectory_limits(config, 512)
    sequences, sampled = 8 if "history" in section else 1, section.get("max_sampled_tokens")
    whole = section.get("max_tokens", 8192)
    assert limits == TrajectoryLimits(3, whole, turn, sequences, sampled)


def test_a_player_reads_calls_where_there_are_tools():
    encoder = BY_NAME["qwen3"].encoder()
    config = SECTION.validate_python({"type": "guess", "history": "branch"})
    made = player(config, encoder, 9, tools=False)
    assert (made._format, made._history, made._limits.max_turn_tokens) == (None, "branch", 9)
    assert player(config, encoder, 9, tools=True)._format is call_format(encoder)
    named = SECTION.validate_python({"type": "guess", "tool_format": "glm"})
    assert player(named, encoder, 9, tools=True)._format is FORMATS["glm"].template
