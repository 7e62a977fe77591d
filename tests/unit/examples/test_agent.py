"""The shipped agent plays, and its configuration is valid."""

import asyncio
from typing import Any

from examples.agent.agent import run
from megatron_opd.config.environment import AgentConfig
from megatron_opd.config.import_path import load_object
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from tests.support.agent_calls import ScriptedSampler, check_trained, served, student
from tests.support.chat_families import BY_NAME
from tests.support.paths import ROOT

PROBLEM = {"role": "user", "content": "2+3="}


def test_the_configuration_names_the_agent():
    config = load_config(Config, ROOT / "examples" / "agent" / "agent.yaml")
    assert isinstance(config.environment, AgentConfig)
    assert load_object(config.environment.function) is run
    assert config.estimator.reads_reward
    assert config.estimator.distils


def test_the_agent_asks_again_after_a_wrong_answer():
    async def play(*turns: str) -> tuple[float, int]:
        sampler = ScriptedSampler(BY_NAME["qwen2.5"], list(turns))
        async with served(student(BY_NAME["qwen2.5"]), sampler) as at:
            row: dict[str, Any] = {"messages": [PROBLEM], "answer": "5"}
            reward = await run(at.endpoint.base_url, at.key, row)
            found = await at.played(reward)
        check_trained(found.trajectory, sampler)
        assert len(found.trajectory.sequences) == 1
        return reward, len(found.turns)

    right, wrong = "#5<|im_end|>", "#6<|im_end|>"
    assert asyncio.run(play(right)) == (1.0, 1)
    assert asyncio.run(play(wrong, right)) == (0.5, 2)
    assert asyncio.run(play(wrong, wrong)) == (0.0, 2)
