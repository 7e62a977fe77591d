"""Dead processes and silent engines are noticed and named."""

import asyncio
import subprocess
import sys

import pytest

from megatron_opd.fleet.ends import explained
from megatron_opd.launch.health import (
    EngineLost,
    HealthGuard,
    ProcessDied,
    WatchedEngine,
    WatchedProcess,
)
from megatron_opd.launch.processes import Processes
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.server.spec import ServerSpec


def sleeper(code="import time; time.sleep(60)"):
    return subprocess.Popen([sys.executable, "-c", code])


def test_a_killed_process_is_named_with_its_signal_and_log(tmp_path):
    process = sleeper()
    log = tmp_path / "student-0.log"
    guard = HealthGuard([WatchedProcess("student-0", process.poll, log)], interval_s=0.02)

    async def scenario():
        watch = asyncio.create_task(guard.watch())
        await asyncio.sleep(0.1)
        assert not watch.done()
        process.kill()
        await watch

    try:
        with pytest.raises(ProcessDied, match=rf"^student-0 ended with signal 9, see {log}$"):
            asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        process.kill()
        process.wait()


def test_even_a_clean_exit_is_a_failure_while_the_process_is_needed():
    process = sleeper("raise SystemExit(0)")
    process.wait()
    guard = HealthGuard([WatchedProcess("learner", process.poll)])
    with pytest.raises(ProcessDied, match="learner ended with exit code 0"):
        asyncio.run(guard.watch())


def test_diagnose_waits_a_moment_for_the_exit_code():
    codes = iter([None, None, None, 3])
    guard = HealthGuard([WatchedProcess("teacher-0", lambda: next(codes, 3))])
    assert str(run_virtual(guard.diagnose())) == "teacher-0 ended with exit code 3"


def test_diagnose_finds_nothing_when_all_live():
    guard = HealthGuard([WatchedProcess("teacher-0", lambda: None)])
    assert run_virtual(guard.diagnose()) is None


def test_an_engine_is_lost_only_after_several_misses_in_a_row():
    answers = iter([False, True, False, False])

    async def alive():
        answer = next(answers, None)
        if answer is None:
            raise TimeoutError
        return answer

    guard = HealthGuard(
        engines=[WatchedEngine("http://far:1", alive)], engine_interval_s=5.0, engine_misses=3
    )

    async def scenario():
        with pytest.raises(EngineLost, match="http://far:1 did not answer 3 times in a row"):
            await guard.watch()
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(25.0)


def lost_after(alive, **options) -> tuple[str, float]:
    """What the guard says of an engine, and after how many (virtual) seconds."""
    guard = HealthGuard(engines=[WatchedEngine("teacher server http://far:1", alive)], **options)

    async def scenario():
        with pytest.raises(EngineLost) as caught:
            await guard.watch()
        return str(caught.value), asyncio.get_running_loop().time()

    return run_virtual(scenario())


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(), ServerUnreachable("u", "/x", "refused", sent=False)]
)
def test_an_engine_where_nobody_listens_is_lost_at_once(error):
    async def alive():
        raise error

    said, after_s = lost_after(alive)
    assert said == "teacher server http://far:1 is gone: nothing listens there any more"
    assert after_s <= 5


def test_a_busy_engine_is_given_time():
    async def alive():
        await asyncio.sleep(5)
        return False

    said, after_s = lost_after(alive)
    assert said == "teacher server http://far:1 did not answer 6 times in a row"
    assert 30 <= after_s <= 60


def test_the_worker_that_ended_a_server_is_named(tmp_path):
    log, cause = tmp_path / "s.log", "detokenizer (pid 7) ended with signal 9"
    server = WatchedProcess("student server http://a:1", lambda: 70, log, lambda: cause)
    with pytest.raises(ProcessDied) as caught:
        run_virtual(HealthGuard([server]).watch())
    assert str(caught.value) == f"student server http://a:1 ended: {cause}, see {log}"


def test_a_cancelled_watch_leaves_no_task():
    async def scenario():
        async def alive():
            return True

        guard = HealthGuard(
            [WatchedProcess("a", lambda: None)],
            [WatchedEngine("b", alive)],
            on_tick=lambda: ticks.append(1),
        )
        watch = asyncio.create_task(guard.watch())
        await asyncio.sleep(20)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    ticks = []
    run_virtual(scenario())
    assert 40 <= len(ticks) <= 41


class DeadServer(ServerProcess):
    """A server whose detokenizer was killed."""

    def exit_code(self):
        return 70

    def cause(self):
        return "detokenizer (pid 7) ended with signal 9"


def test_a_failure_outside_the_loops_names_the_process_too(tmp_path):
    """Before and after the loops run (evaluation) a broken connection is all that is seen."""
    spec = ServerSpec(model_path="m", role="student", port=1234)
    error = ServerUnreachable(spec.url, "/generate", "reset", sent=True)
    dead = Processes([DeadServer(spec, tmp_path / "s.log")], None)
    assert str(run_virtual(explained(error, dead.watched()))) == (
        "student server http://127.0.0.1:1234 ended: detokenizer (pid 7) ended with signal 9, "
        f"see {tmp_path / 's.log'}"
    )
    assert run_virtual(explained(error, [])) is None
