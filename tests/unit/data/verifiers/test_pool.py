"""Worker processes against verifiers that hang, raise, eat memory, crash and return nonsense."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_opd.data.verifiers.messages import Call
from megatron_opd.data.verifiers.pool import PoolLimits, VerifierPool
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.records.drops import (
    VERIFIER_BAD_REWARD,
    VERIFIER_DIED,
    VERIFIER_FAILED,
    VERIFIER_OUT_OF_MEMORY,
    VERIFIER_TIMED_OUT,
)
from tests.support.paths import ROOT
from tests.support.trees import wait_gone

ROGUE = "tests.support.rogue_verifiers"
CALLS = {
    "equal": Call(f"{ROGUE}:equal"),
    "graded": Call(f"{ROGUE}:graded", {"most": 0.75}),
    "rogue": Call(f"{ROGUE}:rogue"),
}
NEVER_S = 300.0
MEMORY = 2**31


def pool(workers: int = 1, timeout_s: float = NEVER_S, calls=CALLS) -> VerifierPool:
    return VerifierPool(calls, PoolLimits(workers, timeout_s, MEMORY))


def with_pool(scenario, **limits):
    async def run():
        async with pool(**limits) as found:
            result = await scenario(found)
            pids = found.pids
        assert not any(psutil.pid_exists(pid) for pid in pids), "workers end with the pool"
        return result

    return asyncio.run(run())


async def outcome(found: VerifierPool, response: str, answer: str = "") -> float | str:
    try:
        return await found.verify("rogue", response, answer)
    except VerifierFailed as failed:
        return failed.reason


def test_verifiers_are_asked_with_their_options():
    async def scenario(found):
        return [
            await found.verify("equal", "a", "a"),
            await found.verify("equal", "a", "b"),
            await found.verify("graded", "ab", "ac"),
            await found.verify("graded", "ab", "ab"),
            await found.verify("equal", "é\0" * 10**6, "é\0" * 10**6),
        ]

    assert with_pool(scenario) == [1.0, 0.0, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("response", "answer", "reason"),
    [
        ("raises", "", VERIFIER_FAILED),
        ("raises_unprintable", "", VERIFIER_FAILED),
        ("exits", "", VERIFIER_FAILED),
        ("recurses", "", VERIFIER_FAILED),
        ("unknown name", "", VERIFIER_FAILED),
        ("returns", "nan", VERIFIER_BAD_REWARD),
        ("returns", "two", VERIFIER_BAD_REWARD),
        ("returns", "none", VERIFIER_BAD_REWARD),
        ("crashes", "", VERIFIER_DIED),
        ("ends", "", VERIFIER_DIED),
        ("eats_memory", "", VERIFIER_OUT_OF_MEMORY),
    ],
)
def test_what_goes_wrong_is_counted_and_the_next_response_is_judged(response, answer, reason):
    async def scenario(found):
        return [
            await outcome(found, response, answer),
            await outcome(found, "returns", "half"),
            await outcome(found, response, answer),
            await outcome(found, "prints"),
        ]

    assert with_pool(scenario) == [reason, 0.5, reason, 1.0]


@pytest.mark.parametrize("response", ["hangs", "hangs_in_c"])
def test_a_verifier_that_hangs_is_ended(response):
    async def scenario(found):
        before = found.pids
        assert await outcome(found, response) == VERIFIER_TIMED_OUT
        return before

    (before,) = with_pool(scenario, timeout_s=0.5)
    assert not psutil.pid_exists(before)


def test_a_hanging_verifier_stops_no_other():
    async def scenario(found):
        stuck = asyncio.create_task(found.verify("rogue", "hangs", ""))
        judged = [await outcome(found, "returns", "half") for _ in range(20)]
        assert not stuck.done()
        stuck.cancel()
        # whoever is cancelled leaves its worker to nobody: its answer would be another's
        more = await asyncio.gather(*(outcome(found, "returns", "half") for _ in range(4)))
        return judged + more

    assert with_pool(scenario, workers=2) == [0.5] * 24


def written(file: Path) -> None:
    """Wait until a verifier has written a line."""
    while not (file.exists() and file.read_text().endswith("\n")):
        time.sleep(0.02)


def test_what_a_verifier_has_started_ends_with_it(tmp_path: Path):
    file = tmp_path / "pid"

    async def scenario(found):
        asked = asyncio.create_task(found.verify("rogue", "starts_a_child_and_hangs", str(file)))
        await asyncio.to_thread(written, file)
        asked.cancel()

    with_pool(scenario)
    wait_gone([int(file.read_text())])


def test_a_lost_worker_is_noticed_between_two_responses():
    async def scenario(found):
        (pid,) = found.pids
        os.kill(pid, signal.SIGKILL)
        return [await outcome(found, "returns", "half") for _ in range(2)]

    assert with_pool(scenario) == [VERIFIER_DIED, 0.5]


def test_the_event_loop_goes_on_while_verifiers_work():
    async def scenario(found):
        asked = asyncio.gather(*(outcome(found, "hangs") for _ in range(4)))
        ticks = 0
        while not asked.done():
            await asyncio.sleep(0)
            ticks += 1
        return await asked, ticks

    reasons, ticks = with_pool(scenario, workers=2, timeout_s=0.3)
    assert reasons == [VERIFIER_TIMED_OUT] * 4
    assert ticks > 10


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:f", "module no_such_module of no_such_module:f cannot be imported"),
        (f"{ROGUE}:none", f"module {ROGUE} has no none"),
    ],
)
def test_a_verifier_that_cannot_be_imported_is_refused_at_the_start(path, words):
    async def scenario():
        async with pool(calls={"mine": Call(path)}):
            pytest.fail("entered")

    with pytest.raises(VerifierFailed, match=words) as caught:
        asyncio.run(scenario())
    assert caught.value.reason == VERIFIER_DIED


CONTROLLER = """
import asyncio, sys
from megatron_opd.data.verifiers.messages import Call
from megatron_opd.data.verifiers.pool import PoolLimits, VerifierPool

async def main():
    call = Call("tests.support.rogue_verifiers:rogue")
    async with VerifierPool({"rogue": call}, PoolLimits(2, 300.0, 2**31)) as pool:
        print(*pool.pids, flush=True)
        await pool.verify("rogue", "hangs_in_c", "")

asyncio.run(main())
"""


def test_no_worker_outlives_a_controller_that_is_killed():
    """One of the two workers is idle, the other hangs in C."""
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert controller.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in controller.stdout.readline().split()]
    assert len(workers) == 2
    controller.kill()
    controller.wait()
    _, left = psutil.wait_procs(workers, timeout=60)
    assert not left
    controller.stdout.close()
