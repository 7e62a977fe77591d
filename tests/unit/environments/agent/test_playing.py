"""An agent in a process of its own costs its own trajectory alone, whatever it does."""

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_opd.environments.agent import runner
from megatron_opd.environments.agent.endpoint import agent_endpoint
from megatron_opd.environments.agent.hosting import AgentHost
from megatron_opd.environments.agent.playing import AgentPlaying
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.guarded import EnvironmentLimits
from megatron_opd.environments.play import Played
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.environments.trajectory import TrajectoryLimits
from megatron_opd.records.drops import (
    ENVIRONMENT_BAD_REPLY,
    ENVIRONMENT_DIED,
    ENVIRONMENT_FAILED,
    ENVIRONMENT_TIMED_OUT,
    ENVIRONMENT_TOO_LONG,
)
from tests.support.agent_calls import SAMPLING, WIDE, ScriptedSampler, check_trained, student
from tests.support.chat_families import BY_NAME
from tests.support.trees import wait_gone

ROGUE = "tests.support.rogue_agents"
MEMORY = 2**31
FAMILY = BY_NAME["qwen2.5"]
COUNTED = {
    "text": ENVIRONMENT_BAD_REPLY,
    "nan": ENVIRONMENT_BAD_REPLY,
    "calls_nothing": ENVIRONMENT_BAD_REPLY,
    "raises": ENVIRONMENT_FAILED,
    "raises_unprintable": ENVIRONMENT_FAILED,
    "exits": ENVIRONMENT_FAILED,
    "cancels": ENVIRONMENT_FAILED,
    "dies": ENVIRONMENT_DIED,
    "eats": ENVIRONMENT_DIED,  # more than MEMORY, less than the machine's
}
HANGING = ("hangs", "hangs_in_c", "sends_garbage")


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@asynccontextmanager
async def playing(
    limits: TrajectoryLimits = WIDE,
    timeout_s: float = 300.0,
    name: str = f"{ROGUE}:run",
    interpreter: str | None = None,
    **arguments,
) -> AsyncIterator[AgentPlaying]:
    bounds = EnvironmentLimits(timeout_s, 2**16)
    host = AgentHost(name, arguments, interpreter, bounds, MEMORY)
    async with host, agent_endpoint(2**20, SAMPLING) as endpoint:
        yield AgentPlaying(host, endpoint, student(FAMILY, limits), timeout_s)


async def one(of: AgentPlaying, does: str) -> Played:
    sampler = ScriptedSampler(FAMILY)
    found = await of.play(EnvironmentRow("hello", does, 7), sampler)
    check_trained(found.trajectory, sampler)
    return found


async def reason(of: AgentPlaying, does: str) -> str:
    with pytest.raises(EnvironmentFailed) as caught:
        await one(of, does)
    assert caught.value.detail.isprintable()
    return caught.value.reason


def test_an_agent_plays_a_trajectory_and_nothing_is_left_of_it():
    async def run():
        before = children()
        async with playing(turns=3) as of:
            found, none, *others = [
                await one(of, does)
                for does in ("well", "none", "starts_another", "leaves_an_orphan")
            ]
            # once its trajectory ends, before the host does
            wait_gone([int(other.reward or 0) for other in others])
        wait_gone([process.pid for process in children() - before])
        return found, none

    found, none = asyncio.run(run())
    assert (found.reward, len(found.turns), found.ended) == (3.0, 3, "done")
    assert len(found.trajectory.sequences) == 1
    assert all(turn.environment_s > 0 for turn in found.turns)
    assert (none.reward, none.turns[-1].reward) == (None, None)


def test_what_an_agent_does_costs_its_own_trajectory_for_a_reason():
    async def run():
        async with playing() as of:
            reasons = asyncio.gather(*(reason(of, does) for does in COUNTED))
            beside = asyncio.gather(*(one(of, "well") for _ in range(3)))
            return await reasons, await beside

    reasons, beside = asyncio.run(run())
    assert dict(zip(COUNTED, reasons, strict=True)) == COUNTED
    assert [each.reward for each in beside] == [2.0] * 3


def test_agents_that_hang_are_ended_while_others_go_on():
    """Refused calls are no sign of life; others have so much time that a busy machine ends none."""

    async def run():
        before = children()
        async with playing(timeout_s=1.0) as short, playing() as of:
            reasons = asyncio.gather(*(reason(short, does) for does in HANGING))
            beside = await asyncio.gather(*(one(of, "well") for _ in range(3)))
            return await reasons, beside, before

    reasons, beside, before = asyncio.run(run())
    wait_gone([process.pid for process in children() - before])
    assert reasons == [ENVIRONMENT_TIMED_OUT] * len(HANGING)
    assert [each.ended for each in beside] == ["done"] * 3


def test_a_limit_keeps_what_was_played_whatever_the_agent_makes_of_it():
    limits = TrajectoryLimits(3, 10**6, 1000, 9)

    async def run():
        async with playing(limits) as of:
            found = [await one(of, does) for does in ("never_ends", "never_ends_and_returns")]
        async with playing(TrajectoryLimits(3, 5, 5)) as of:
            return found, await reason(of, "never_ends")

    found, too_long = asyncio.run(run())
    assert [(f.ended, len(f.turns), f.reward) for f in found] == [
        ("max_turns", 3, None),
        ("max_turns", 3, 0.5),
    ]
    assert too_long == ENVIRONMENT_TOO_LONG


def test_what_sampling_raises_ends_it():
    class Lost(Exception):
        pass

    async def loses(ids, room, *, stop=()):
        raise Lost

    async def run():
        async with playing() as of:
            before = children()
            with pytest.raises(Lost):
                await of.play(EnvironmentRow("hello", "well"), loses)
            held = ScriptedSampler(FAMILY, held=asyncio.Event())
            task = asyncio.create_task(of.play(EnvironmentRow("hello", "well"), held))
            await held.begun.wait()
            task.cancel()  # as a run does that ends
            with pytest.raises(asyncio.CancelledError):
                await task
            wait_gone([process.pid for process in children() - before])

    asyncio.run(run())


def test_another_python_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A script that begins it without any package but those of its own."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # nobody is asked who serves it

    async def run(interpreter: str | None) -> float | None:
        async with playing(interpreter=interpreter) as of:
            return (await one(of, "version")).reward

    assert asyncio.run(run(str(python))) == sys.version_info[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "has no attribute 'nothing'"),
        ("NOT_CALLABLE", "must be an async function"),
    ],
)
def test_what_is_no_agent_is_told_before_any_runs(name: str, words: str):
    async def enter() -> None:
        async with playing(name=f"{ROGUE}:{name}"):
            pass

    with pytest.raises(ValueError, match=words) as caught:
        asyncio.run(enter())
    assert str(caught.value).startswith("environment.function: tests.support.rogue_agents:")


def test_a_function_that_cannot_be_called_so_is_told():
    async def run():
        names = [f"{ROGUE}:{name}" for name in ("not_async", "wrong_arguments")]
        async with playing(name=names[0]) as plain, playing(name=names[1]) as wrong:
            return await reason(plain, "well"), await reason(wrong, "well")

    assert asyncio.run(run()) == (ENVIRONMENT_BAD_REPLY, ENVIRONMENT_FAILED)


def test_what_the_client_imports_with_its_first_call_is_imported_once():
    async def run():
        async with playing(name="tests.support.openai_agents:imports") as of:
            return (await one(of, "well")).reward

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        *((np.float32(0.25), 0.25), (np.int64(2), 2.0), (np.array([0.5]), 0.5), (True, 1.0)),
        *((np.float32("nan"), None), (np.array([1.0, 2.0]), None), (math.inf, None), (1j, None)),
    ],
)
def test_a_number_of_numpys_is_a_reward_as_pythons_is(reward, said: float | None):
    found = runner.returned(reward)
    assert found.get("reward") == said
    assert type(found.get("reward")) is type(said)
    assert found["type"] == ("AgentFailed" if said is None else "AgentReturned")


def test_the_runner_counts_with_the_runs_words():
    words = (runner.FAILED, runner.DIED, runner.BAD_REPLY)
    assert words == (ENVIRONMENT_FAILED, ENVIRONMENT_DIED, ENVIRONMENT_BAD_REPLY)


def test_a_process_ends_with_the_run():
    with pytest.raises(SystemExit, match="has ended"):
        runner.end_with(os.getpid())
