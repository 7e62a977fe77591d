"""An environment that misbehaves costs its own trajectory alone, with a reason to count."""

import asyncio

import numpy as np
import pytest

from megatron_opd.environments.calls import Reply
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.guarded import EnvironmentLimits, GuardedEnvironment
from megatron_opd.environments.protocol import EnvironmentRow, Said, TrajectoryEnd
from megatron_opd.environments.words import read_answer
from megatron_opd.records.drops import (
    ENVIRONMENT_BAD_REPLY,
    ENVIRONMENT_DIED,
    ENVIRONMENT_FAILED,
    ENVIRONMENT_REASONS,
    ENVIRONMENT_TIMED_OUT,
    ENVIRONMENT_TOO_LONG,
)
from tests.support.rogue_environments import (
    REWARDS,
    VALUES,
    RogueEnvironment,
    SyncEnvironment,
    ToolsEnvironment,
)

ROW, REPLY = EnvironmentRow("hello"), Reply(0, "hi")
LIMITS = EnvironmentLimits(timeout_s=300.0, message_bytes=2**16)
RAISED = {
    "raises": (ENVIRONMENT_FAILED, "step: RuntimeError: two lines \\x1b[31m"),
    "raises_unprintable": (ENVIRONMENT_FAILED, "step: UnprintableError"),
    "exits": (ENVIRONMENT_FAILED, "step: RuntimeError: step raised SystemExit"),
    "cancels": (ENVIRONMENT_FAILED, "step cancelled itself"),
    "eats": (ENVIRONMENT_DIED, "step took too much memory"),
    "grows": (ENVIRONMENT_TOO_LONG, "an answer must have at most 65536 bytes"),
    "deep": (ENVIRONMENT_BAD_REPLY, "it must say messages of at most 32 levels"),
}
BOTH = [*RAISED, *(name for name in VALUES if name not in ("system", *REWARDS))]


def failed(environment, method: str = "step", limits: EnvironmentLimits = LIMITS):
    async def run():
        guarded = GuardedEnvironment(environment, limits)
        with pytest.raises(EnvironmentFailed) as caught:
            await (guarded.step(REPLY) if method == "step" else guarded.start(ROW))
        return caught.value

    return asyncio.run(run())


@pytest.mark.parametrize("does", RAISED)
def test_what_it_raises_is_counted(does: str):
    found = failed(RogueEnvironment(does))
    assert (found.reason, found.detail) == RAISED[does]


@pytest.mark.parametrize("does", VALUES)
def test_what_it_may_not_say_is_counted(does: str):
    found = failed(RogueEnvironment(does))
    assert found.reason == ENVIRONMENT_BAD_REPLY
    assert "\n" not in found.detail
    assert len(found.detail) <= 240


@pytest.mark.parametrize("does", BOTH)
def test_the_same_holds_at_its_start(does: str):
    assert failed(RogueEnvironment(f"start_{does}"), "start").reason in ENVIRONMENT_REASONS


def test_one_that_hangs_is_cancelled():
    async def run():
        limits = EnvironmentLimits(0.05, 2**16)
        with pytest.raises(EnvironmentFailed) as caught:
            await GuardedEnvironment(RogueEnvironment("hangs"), limits).step(REPLY)
        await asyncio.sleep(0)
        return caught.value, len(asyncio.all_tasks())

    found, tasks = asyncio.run(run())
    assert (found.reason, found.detail) == (ENVIRONMENT_TIMED_OUT, "step took over 0.05 s")
    assert tasks == 1


def test_one_that_does_not_let_itself_be_cancelled_is_not_waited_for():
    async def run():
        limits = EnvironmentLimits(0.05, 2**16)
        with pytest.raises(EnvironmentFailed):
            await GuardedEnvironment(RogueEnvironment("hangs_stubbornly"), limits).step(REPLY)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(left)
        return len(left)

    assert asyncio.run(run()) == 1


def test_one_that_is_cancelled_from_outside_is_no_failure():
    async def run():
        guarded = GuardedEnvironment(RogueEnvironment("hangs"), LIMITS)
        task = asyncio.create_task(guarded.step(REPLY))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_methods_must_be_async():
    assert failed(SyncEnvironment()).detail == "step must be async, got str"


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        (7, ENVIRONMENT_FAILED),
        (ValueError("no tools"), ENVIRONMENT_FAILED),
        (["x"], ENVIRONMENT_BAD_REPLY),
        ([{}], ENVIRONMENT_BAD_REPLY),
        ([{"name": "x" * 70_000}], ENVIRONMENT_TOO_LONG),
    ],
)
def test_tools_that_are_none_are_counted(tools, reason: str):
    assert failed(ToolsEnvironment(tools), "start").reason == reason


def test_one_that_behaves_is_heard():
    async def run():
        guarded = GuardedEnvironment(RogueEnvironment(text="a\ud83d\ude42b\ud83d"), LIMITS)
        chat = await guarded.start(ROW)
        answers = [await guarded.step(REPLY) for _ in range(3)]
        return chat, answers

    chat, answers = asyncio.run(run())
    assert [(m.role, m.content) for m in chat] == [("user", "hello")]
    assert [answer.reward for answer in answers] == [0.5, 0.5, 3.0]
    assert [answer.ended for answer in answers] == [False, False, True]
    # both halves of a character are one, one half alone is replaced
    assert answers[0].messages[0].content == "a🙂b\ufffd"
    assert answers[2].messages == ()


def test_a_text_as_long_as_the_limit_is_heard():
    async def run(text: str):
        limits = EnvironmentLimits(300.0, 1000)
        return await GuardedEnvironment(RogueEnvironment(text=text), limits).step(REPLY)

    assert len(asyncio.run(run("é" * 500)).messages[0].content) == 500
    with pytest.raises(EnvironmentFailed):
        asyncio.run(run("é" * 501))


@pytest.mark.parametrize(
    ("reward", "heard"),
    [(np.float32(0.25), 0.25), (np.int64(-3), -3.0), (np.array([0.5]), 0.5), (np.True_, 1.0)],
)
def test_a_number_of_numpys_is_a_reward_as_pythons_is(reward, heard: float):
    for said in (TrajectoryEnd(reward), Said("Go on.", reward)):
        found = read_answer(said, 100).reward
        assert (found, type(found)) == (heard, float)
