"""CPU of every process of a sample's way, with 0, 1, 2, ... data workers.

    python -m benchmarks data_workers [--tokens N ...] [--ids N ...] [--workers N ...] [--updates N]

Servers are fakes that answer prepared bytes over loopback HTTP, in a process of their own, and so
is the learner's head: it takes its samples from the controller (0 workers) or from the workers over
the real encrypted sockets, and throws them away. All between them is real. cpu_us: of one sample,
of each process, its start apart; workers: all together. samples_s: by the clock, on this machine's
cores, which servers, head and workers share. controller_bytes: that the controller's sockets carry
a sample.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psutil

from benchmarks.data_path.cases import Case
from benchmarks.data_path.parts import NoWeights, configuration, fake_servers, prompts, silent
from benchmarks.data_workers.head import Head
from harness.processes import cpu_s
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import make_schedule
from megatron_opd.data_workers.fleet_calls import sampled_by_workers, scored_by_workers
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.wire.keys import RANK_VARIABLE, RunKeys
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet

TOKENS, IDS, WORKERS = (4096, 16384), (14, 29), (0, 1, 2)
BATCH = 32
TIMEOUT_S = 120.0
LARGEST = 1 << 30
CONTROLLER, HEAD, SERVERS = "controller", "head", "servers"


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return one entry a case and number of workers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks data_workers")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--ids", type=int, nargs="+", default=list(IDS))
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--updates", type=int, default=12)
    given = parser.parse_args(list(options))
    cases = [Case(tokens, ids, False) for tokens in given.tokens for ids in given.ids]
    return {
        "batch": BATCH,
        "entries": [
            asyncio.run(entry(case, workers, given.updates))
            for case in cases
            for workers in given.workers
        ],
    }


async def entry(case: Case, workers: int, updates: int) -> dict[str, Any]:
    """Measure one case."""
    keys = RunKeys.make()
    with fake_servers(case) as (student, teacher), Head(keys) as head:
        async with pool_of(workers, keys) as pool:
            # a first run warms every process up: imports, connections
            for made in (2, updates):
                before = cpu_seconds()
                began_s = time.monotonic()
                learner = await run(case, made, student, teacher, head, pool)
                took_s = time.monotonic() - began_s
                used = {name: s - before.get(name, 0.0) for name, s in cpu_seconds().items()}
    samples = updates * BATCH
    assert learner == samples, f"the head took {learner} of {samples} samples"
    return {
        "case": case.name,
        "workers": workers,
        "cpu_us": {name: round(seconds / samples * 1e6) for name, seconds in used.items()},
        "samples_s": round(samples / took_s, 1),
    }


async def run(
    case: Case, updates: int, student: str, teacher: str, head: Head, pool: WorkerPool | None
) -> int:
    """Make updates; return how many samples the head took."""
    config = configuration(case, updates, BATCH, slots=BATCH)
    async with (
        Fleet([ServerClient(student, timeout_s=TIMEOUT_S)]) as students,
        Fleet([ServerClient(teacher, timeout_s=TIMEOUT_S)]) as teachers,
    ):
        vocab_size = students.infos[0].vocab_size
        sample = elsewhere = None
        if pool is not None:
            sample = sampled_by_workers(pool, students)
            elsewhere = scored_by_workers(pool, {"teacher": vocab_size})
        scorer = FleetScorer(config, {"teacher": teachers}, vocab_size, "bench", None, elsewhere)
        learner = head.learner(config, pool)
        ports = Ports(
            prompts=prompts(case),
            rollout=RolloutGenerator(config, students, vocab_size, "bench", (), sample),
            teacher=scorer,
            learner=learner,
            weight_sync=NoWeights(),
            observer=silent(),
            store=pool,
        )
        accounting = await Controller(make_schedule(config), ports).run()
    assert accounting.consumed == updates * BATCH, accounting
    return learner.taken


@asynccontextmanager
async def pool_of(
    count: int, keys: RunKeys, module: str = "benchmarks.data_workers.worker"
) -> AsyncIterator[WorkerPool | None]:
    """Keep so many data workers, which `module` runs; None for none."""
    if not count:
        yield None
        return
    pool = WorkerPool(count, "127.0.0.1", keys, LARGEST)
    pool.connections.open()
    with processes(pool.connections.address, count, keys, module):
        await pool.ready()
        try:
            yield pool
        finally:
            pool.connections.close()


@contextmanager
def processes(address: str, count: int, keys: RunKeys, module: str) -> Iterator[None]:
    """Run so many workers, without a judge."""
    environment = {**os.environ, RANK_VARIABLE: keys.ranks.text(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, address]
    started = [subprocess.Popen([*command, str(index)], env=environment) for index in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.wait(TIMEOUT_S)


def cpu_seconds() -> dict[str, float]:
    """Return what each kind of process has used: this one, and the children by their module."""
    found = {CONTROLLER: time.process_time()}
    for child in psutil.Process().children():
        words = " ".join(child.cmdline())
        kinds = {"data_path.servers": SERVERS, "data_workers.head": HEAD}
        name = next((kind for word, kind in kinds.items() if word in words), "workers")
        found[name] = found.get(name, 0.0) + cpu_s(child.pid)
    return found
