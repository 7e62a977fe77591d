"""Records what servers and processes do, on the run's time line, for `opd simulate --calibrate`.

Servers tell what their forward passes took (sglang_bridge/work.py). Of processes on this machine
the CPU seconds are read: a machine with few cores is shared by all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping

import psutil

from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.launch.processes import Processes
from megatron_opd.metrics.timeline import CONTROLLER, Timeline
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError
from sglang_bridge.fleet import Fleet
from sglang_bridge.server.launch import ServerProcess

INTERVAL_S = 2.0
"""Seconds between two looks, each of which costs a server one short request."""


@contextlib.asynccontextmanager
async def recorded_work(
    timeline: Timeline, fleets: Mapping[Role, Fleet], processes: Processes
) -> AsyncIterator[None]:
    """Look at the beginning of the block, and again and again inside it."""
    await _look(timeline, fleets, processes)
    task = asyncio.create_task(_looks(timeline, fleets, processes))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _looks(timeline: Timeline, fleets: Mapping[Role, Fleet], processes: Processes) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        await _look(timeline, fleets, processes)


async def _look(timeline: Timeline, fleets: Mapping[Role, Fleet], processes: Processes) -> None:
    asked = [
        _ask(timeline, client, teaches=role != STUDENT)
        for role, fleet in fleets.items()
        for client in fleet.clients
    ]
    await asyncio.gather(*asked)
    timeline.used(cpu_seconds(processes), len(os.sched_getaffinity(0)), time.monotonic())


async def _ask(timeline: Timeline, client: ServerClient, *, teaches: bool) -> None:
    # one that does not answer is not in this look; the supervisor sees to it
    with contextlib.suppress(BridgeError, TimeoutError):
        async with asyncio.timeout(INTERVAL_S):
            work = await client.work()
        timeline.worked(client.url, work, time.monotonic(), teaches=teaches)


def cpu_seconds(processes: Processes) -> dict[str, float]:
    """Return what each part on this machine has used of its cores: controller, servers by url."""
    found = {CONTROLLER: time.process_time()}
    for server in processes.servers:
        if isinstance(server, ServerProcess) and server.pid is not None:
            # it may end while it is looked at
            with contextlib.suppress(psutil.NoSuchProcess):
                found[server.url] = server_cpu_s(server)
    return found


def server_cpu_s(server: ServerProcess) -> float:
    """Return the CPU seconds of all processes of a server that runs. Raises NoSuchProcess."""
    root, total = psutil.Process(server.pid), 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
