"""Servers are asked what they do from the beginning of a run on, and may not answer."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from megatron_opd.launch.processes import Processes
from megatron_opd.run import work_watch
from megatron_opd.run.work_watch import cpu_seconds, recorded_work
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.work import PassSums, ServerWork

SPUN_S = 0.3
SPIN = f"""
import time
while time.process_time() < {SPUN_S}:
    pass
print(flush=True)
time.sleep(600)
"""


class Client:
    def __init__(self, url: str) -> None:
        self.url, self.looks = url, 0

    async def work(self) -> ServerWork:
        self.looks += 1
        if self.url == "gone":
            raise ServerUnreachable(self.url, "/weights_checker", "refused", sent=False)
        if self.url == "silent":
            await asyncio.sleep(600)
        return ServerWork(decode=PassSums().plus(self.looks, 1, 1.0, 1.0))


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, bool]] = []
        self.cpus: list[dict[str, float]] = []

    def worked(self, url: str, work: ServerWork, now_s: float, *, teaches: bool) -> None:
        self.seen.append((url, work.decode.gram[1], teaches))

    def used(self, cpu_s: dict[str, float], cores: int, now_s: float) -> None:
        assert cores == len(os.sched_getaffinity(0))
        self.cpus.append(cpu_s)


def test_every_server_is_asked_from_the_beginning_on():
    recorder: Any = Recorder()
    fleets: Any = {
        role: type("Fleet", (), {"clients": [Client(url) for url in urls]})()
        for role, urls in {"student": ["a", "gone"], "teacher": ["t", "silent"]}.items()
    }

    async def run() -> None:
        async with recorded_work(recorder, fleets, Processes([], None)):
            await asyncio.sleep(4.5 * work_watch.INTERVAL_S)

    run_virtual(run())
    # a silent one takes a whole interval of each look
    assert recorder.seen == [(url, look, url == "t") for look in (1, 2, 3) for url in ("a", "t")]
    assert len(recorder.cpus) == 3
    assert all(seen.keys() == {"controller"} for seen in recorder.cpus)


def test_nothing_is_left_of_it_when_the_run_fails():
    recorder: Any = Recorder()

    async def failing() -> None:
        async with recorded_work(recorder, {}, Processes([], None)):
            assert len(asyncio.all_tasks()) == 2
            raise RuntimeError("the run")

    async def run() -> int:
        with pytest.raises(RuntimeError, match="the run"):
            await failing()
        return len(asyncio.all_tasks())

    assert run_virtual(run()) == 1
    assert len(recorder.cpus) == 1


def test_a_server_s_seconds_are_those_of_all_its_processes(monkeypatch: pytest.MonkeyPatch):
    class Local:
        url, pid = "http://s", os.getpid()

    class Ended:
        url, pid = "http://gone", 2**22 + 1  # above the largest process id

    monkeypatch.setattr(work_watch, "ServerProcess", (Local, Ended))
    servers: Any = (Local(), Ended(), object())
    processes = Processes(servers, None)
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it has used its seconds by now
        before = psutil.Process().cpu_times()
        found = cpu_seconds(processes)
        child.kill()
    assert found.keys() == {"controller", "http://s"}
    assert found["http://s"] >= before.user + before.system + SPUN_S - 0.1  # read in ticks
