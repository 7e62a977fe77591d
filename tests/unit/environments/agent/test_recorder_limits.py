"""Limits of a trajectory: those that end it, and that of a sequence, beside which others go on."""

import asyncio
import re

import openai
import pytest

from megatron_opd.environments.trajectory import TrajectoryLimits
from tests.support.agent_calls import ASKED, MORE, Served, played


@pytest.mark.parametrize(
    ("limits", "turns", "code"),
    [
        (TrajectoryLimits(2, 10**6, 1000, 9), 2, "max_turns"),
        (TrajectoryLimits(9, 10**6, 4, 9), 1, "max_turn_tokens"),
        (TrajectoryLimits(9, 10**6, 1000, 1), 2, "max_sequences"),
        (TrajectoryLimits(9, 10**6, 1000, 9, 20), 2, "max_sampled_tokens"),
    ],
)
def test_a_limit_ends_a_trajectory_with_what_it_has(
    limits: TrajectoryLimits, turns: int, code: str
):
    async def agent(at: Served):
        messages = [*ASKED]
        for _ in range(turns):
            messages += [await at.said(messages), MORE]
        asked = ASKED if code == "max_sequences" else messages
        for _ in range(2):
            with pytest.raises(openai.BadRequestError) as caught:
                await at.said(asked)
        return caught.value.code

    found_code, found = played(
        agent, *["the tool says that the answer<|im_end|>"] * 3, limits=limits
    )
    assert (found_code, found.ended) == (code, code)
    assert len(found.turns) == turns


def test_a_full_sequence_refuses_its_calls_while_others_go_on():
    """As from a server with that context: an agent shortens its messages, and goes on."""
    limits = TrajectoryLimits(9, 60, 1000, 9)

    def agent(*then: str):
        async def run(at: Served):
            messages = [*ASKED, await at.said(ASKED), MORE, {"role": "user", "content": "?" * 60}]
            with pytest.raises(openai.BadRequestError) as caught:
                await at.said(messages)
            for content in then:
                await at.said([{"role": "user", "content": content}])
            return caught.value

        return run

    error, found = played(agent(), "5<|im_end|>", limits=limits)
    assert error.code == "context_length_exceeded"
    assert re.search(r"messages of \d+ tokens leave no room .*max_tokens, 60: shorten", str(error))
    assert (found.ended, len(found.turns)) == ("max_tokens", 1)
    _, found = played(agent("1?", "2?"), *["5<|im_end|>"] * 3, limits=limits)
    assert (found.ended, len(found.turns)) == ("done", 3)
    assert sum(map(len, found.trajectory.sequences)) > limits.max_tokens
    _, found = played(agent("1?"), "5<|im_end|>", "12345 " * 30, limits=limits)  # is cut there
    assert (found.ended, len(found.trajectory.sequences[-1])) == ("max_tokens", limits.max_tokens)


def test_parallel_calls_share_the_tokens_that_are_left():
    """Eight calls of up to 9 tokens each, of which all together have 20."""
    limits = TrajectoryLimits(9, 10**6, 9, 9, 20)

    async def agent(at: Served):
        asked = [[{"role": "user", "content": f"{n}?"}] for n in range(8)]
        return await asyncio.gather(*map(at.said, asked), return_exceptions=True)

    for seed in range(5):
        found, trajectory = played(agent, limits=limits, seed=seed)
        assert trajectory.trajectory.num_sampled == limits.max_sampled_tokens
        assert any(isinstance(each, openai.BadRequestError) for each in found)
        assert trajectory.ended == "max_sampled_tokens"
