"""An environment in a process of its own costs its own trajectory alone, whatever it does."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_opd.data.chats import USER, ChatMessage
from megatron_opd.environments.calls import Reply, ToolCall
from megatron_opd.environments.failed import EnvironmentFailed, HostLost
from megatron_opd.environments.guarded import EnvironmentLimits
from megatron_opd.environments.hosted import EnvironmentHost
from megatron_opd.environments.protocol import EnvironmentRow, row_of
from megatron_opd.records.drops import (
    ENVIRONMENT_BAD_REPLY,
    ENVIRONMENT_DIED,
    ENVIRONMENT_FAILED,
    ENVIRONMENT_TIMED_OUT,
    ENVIRONMENT_TOO_LONG,
)
from megatron_opd.records.types import Prompt
from tests.support.chat_families import ADD
from tests.support.paths import ROOT
from tests.support.trees import wait_gone

ROGUE = "tests.support.rogue_environments:RogueEnvironment"
ROW, REPLY = EnvironmentRow("hello"), Reply(0, "hi")
MEMORY = 2**31
COUNTED = {
    "dies": ENVIRONMENT_DIED,
    "eats_some": ENVIRONMENT_DIED,  # more than MEMORY, less than the machine's
    "exits": ENVIRONMENT_FAILED,
    "raises": ENVIRONMENT_FAILED,
    "number": ENVIRONMENT_BAD_REPLY,
    "object": ENVIRONMENT_BAD_REPLY,
    "grows": ENVIRONMENT_TOO_LONG,
}
HANGING = ("hangs", "hangs_in_c", "hangs_stubbornly")


def host(timeout_s: float = 300.0, kind: str = ROGUE, **options):
    return EnvironmentHost(kind, options, EnvironmentLimits(timeout_s, 2**16), MEMORY)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


async def reason(of: EnvironmentHost, does: str) -> str:
    async with of.environment() as partner:
        await partner.start(EnvironmentRow("hello", does))
        with pytest.raises(EnvironmentFailed) as caught:
            await partner.step(REPLY)
        return caught.value.reason


def test_it_answers_as_in_this_process():
    async def run():
        before = children()
        async with host(text="<é🙂>") as of, of.environment() as partner:
            chat = await partner.start(ROW)
            answers = [await partner.step(REPLY) for _ in range(3)]
            started = children() - before
            many = await asyncio.gather(*(first_of(of, number) for number in range(20)))
        return chat, answers, started, many

    async def first_of(of: EnvironmentHost, number: int) -> str:
        async with of.environment() as partner:
            row = EnvironmentRow(str(number), columns={"goal": {"n": [number, None, "é"]}})
            (message,) = await partner.start(row)
            return message.content

    chat, answers, started, many = asyncio.run(run())
    assert chat == (ChatMessage(USER, "hello"),)
    assert answers[0].messages == (ChatMessage(USER, "<é🙂>"),)
    rewards = [(answer.reward, answer.ended) for answer in answers]
    assert rewards == [(0.5, False), (0.5, False), (3.0, True)]
    assert many == [f"{n}{{'goal': {{'n': [{n}, None, 'é']}}}}" for n in range(20)]
    assert len(started) == 2
    wait_gone([process.pid for process in started])


def test_a_row_may_bring_its_tools():
    async def run():
        async with (
            host(kind="tests.support.rogue_environments:ToolsOfTheRow") as of,
            of.environment() as partner,
        ):
            return await partner.start(row_of(prompt, 0))

    asked = {"role": USER, "content": "2 + 3?"}
    prompt = Prompt(0, np.zeros(1, np.int32), "", messages=(asked,), tools=(ADD,))
    chat = asyncio.run(run())
    assert chat == (ChatMessage(USER, "2 + 3?"),)
    assert list(chat.tools) == [ADD]


def test_tools_and_calls_go_through():
    async def run():
        async with host(kind="calculator") as of, of.environment() as partner:
            chat = await partner.start(EnvironmentRow((ChatMessage(USER, "2 + 3?"),)))
            call = ToolCall("call00000", "calculate", {"expression": "2 + 3"})
            return chat, await partner.step(Reply(0, "", "", (call,)))

    chat, answer = asyncio.run(run())
    assert chat.tools[0]["function"]["name"] == "calculate"
    (message,) = answer.messages
    assert (message.role, message.content, message.others["name"]) == ("tool", "5", "calculate")


def test_what_it_does_is_counted_and_others_go_on():
    async def run():
        async with host() as of, of.environment() as partner:
            await partner.start(ROW)
            found = await asyncio.gather(*(reason(of, does) for does in COUNTED))
            return found, await partner.step(REPLY)

    found, answer = asyncio.run(run())
    assert dict(zip(COUNTED, found, strict=True)) == COUNTED
    assert answer.reward == 0.5


def test_nothing_that_it_started_is_left_whose_parent_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ORPHAN", str(tmp_path / "pid"))

    async def run():
        async with host() as of:
            async with of.environment() as partner:
                await partner.start(EnvironmentRow("hello", "leaves_an_orphan"))
                answer = await partner.step(REPLY)
            await asyncio.to_thread(wait_gone, [int(answer.reward or 0)])
            assert await reason(of, "dies_before_an_orphan") == ENVIRONMENT_DIED
            async with of.environment():
                pid = int((tmp_path / "pid").read_text())
                await asyncio.to_thread(wait_gone, [pid])

    asyncio.run(run())


def test_one_that_hangs_is_killed_and_does_not_stop_others():
    async def run():
        async with host(timeout_s=0.5) as of, of.environment() as partner:
            await partner.start(ROW)
            before = children()
            found = await asyncio.gather(*(reason(of, does) for does in HANGING))
            answers = [await partner.step(REPLY) for _ in range(3)]
            left = children() - before
            await asyncio.to_thread(wait_gone, [each.pid for each in left])
        return found, answers[-1].ended

    assert asyncio.run(run()) == ([ENVIRONMENT_TIMED_OUT] * 3, True)


def test_another_host_takes_the_place_of_one_that_died():
    async def run():
        before = children()
        async with host() as of:
            (process,) = children() - before
            async with of.environment() as partner:
                process.kill()
                process.wait()
                with pytest.raises(EnvironmentFailed) as caught:
                    await partner.start(ROW)
                assert caught.value.reason == ENVIRONMENT_DIED
            async with of.environment() as partner:
                return await partner.start(ROW)

    assert asyncio.run(run()) == (ChatMessage(USER, "hello"),)


@pytest.mark.parametrize("whole", [True, False], ids=["a host", "one process"])
def test_the_loss_of_a_host_is_told_from_that_of_one_process(whole: bool):
    async def run() -> None:
        before = children()
        async with host() as of:
            (process,) = children() - before
            async with of.environment() as partner:
                await partner.start(ROW)
                (own,) = process.children()
                (process if whole else own).kill()
                if whole:  # its processes end after it
                    psutil.wait_procs([process, own])
                await partner.step(REPLY)

    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(run())
    assert caught.value.reason == ENVIRONMENT_DIED
    assert isinstance(caught.value, HostLost) is whole


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"nothing": 1}, "environment: .*unexpected keyword argument 'nothing'"),
        ({"text": "x" * 140_000}, "must each have at most 131072 bytes, got 140"),
    ],
)
def test_one_that_cannot_be_made_is_told_at_the_start(options, error: str):
    async def run():
        before = children()
        with pytest.raises(ValueError, match=error):
            async with host(**options):
                pass
        return children() - before

    assert asyncio.run(run()) == set()


PROGRAM = """
import asyncio, sys
from tests.unit.environments.test_hosted import REPLY, ROW, host

async def run():
    async with host(does="hangs_in_c") as of, of.environment() as partner:
        await partner.start(ROW)
        hanging = asyncio.create_task(partner.step(REPLY))
        await asyncio.sleep(0.2)
        print("started", flush=True)
        await hanging

asyncio.run(run())
"""


def test_nothing_outlives_a_run_that_is_killed():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_gone([each.pid for each in started])
