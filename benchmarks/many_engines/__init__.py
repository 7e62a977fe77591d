"""What the controller costs with data workers, from a few engines to thousands.

    python -m benchmarks many_engines [--engines N ...] [--workers N] [--updates N N]
        [--mean-s S ...]

The controller is real: its loops, buffers, permits, fleets, data workers' pool, sockets and
encryption, and the messages to the learner's head. Data workers and head are fakes in one process
of their own, which hold no arrays; engines are names that the workers answer for. A batch is 4
samples an engine, two are in flight, and a weight sync follows every update. mean_s: how long a
completion takes (fakes.py); 0: no time, so that the controller is never idle and its messages go
out in large lots.

Each entry is two runs, one longer than the other. cpu_us: CPU time of the controller's process a
sample, its ZeroMQ threads and the kernel included, over the whole longer run. further_us: what a
sample costs once the run has begun, the difference of the two runs: in the shorter one, making and
ending a task for every request in flight is a good part. recorded_us: as cpu_us, of another such
run with the observer of a real run, which counts for metrics.jsonl and summary.json; in the others
it is one that counts nothing. busy: the share of the time that it used a core. peak_mib: resident
at most; base_mib: before the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from benchmarks.data_path.cases import Case
from benchmarks.data_path.parts import FIGURES, NoWeights, configuration, prompts, silent
from benchmarks.many_engines.figures import IDS_A_TOKEN, LARGEST, TOKENS, VERSION
from megatron_opd.batching.shares import shares
from megatron_opd.config.schema import Config
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.garbage import freeze_objects, rare_collections
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import make_schedule
from megatron_opd.data_workers.fleet_calls import sampled_by_workers, scored_by_workers
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Phase, WeightSyncReport
from megatron_opd.records.types import AnySample, Batch, HeldSample, LearnerTurn
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.transport.frames import to_frames
from megatron_opd.transport.messages import UpdateMetrics
from megatron_opd.wire.gate import show_keys
from megatron_opd.wire.keys import RANK_VARIABLE, RunKeys
from megatron_opd.wire.sockets import SocketLimits
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet

ENGINES, WORKERS, UPDATES, MEAN_S = (64, 4096), 64, (4, 20), (0.0, 8.0)
BATCH_AN_ENGINE = 4
VOCAB_SIZE = 151_936
TIMEOUT_S = 600.0
ENDED_S = 60.0
CASE = Case(TOKENS, IDS_A_TOKEN, False)


@dataclass(frozen=True)
class Size:
    """Says what is run."""

    engines: int
    workers: int
    updates: int
    mean_s: float
    records: bool = False

    @property
    def batch(self) -> int:
        """Returns the samples of an update."""
        return BATCH_AN_ENGINE * self.engines


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return one entry a number of engines and time of a completion, each in its own process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks many_engines")
    parser.add_argument("--engines", type=int, nargs="+", default=list(ENGINES))
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--updates", type=int, nargs=2, default=list(UPDATES))
    parser.add_argument("--mean-s", type=float, nargs="+", default=list(MEAN_S))
    given = parser.parse_args(list(options))
    entries: list[dict[str, Any]] = []
    for engines in given.engines:
        for mean_s in given.mean_s:
            workers = min(given.workers, engines)
            sizes = [Size(engines, workers, n, mean_s) for n in sorted(given.updates)]
            found = both(*map(in_its_own, sizes))
            recorded = in_its_own(replace(sizes[-1], records=True))
            entries.append({**found, "recorded_us": recorded["cpu_us"]})
    return {"entries": entries}


def both(shorter: dict[str, Any], longer: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of two runs."""
    more = longer["samples"] - shorter["samples"]
    more_us = longer["cpu_us"] * longer["samples"] - shorter["cpu_us"] * shorter["samples"]
    short = {f"shorter_{key}": shorter[key] for key in ("samples", "cpu_us")}
    return {**longer, **short, "further_us": round(more_us / more, 1)}


def in_its_own(size: Size) -> dict[str, Any]:
    """Measure one run in a process of its own, whose peak memory is the run's."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(entry, (size,))


def entry(size: Size) -> dict[str, Any]:
    """Measure one run."""
    return asyncio.run(_entry(size))


async def _entry(size: Size) -> dict[str, Any]:
    keys = RunKeys.make()
    pool = WorkerPool(size.workers, "127.0.0.1", keys, LARGEST)
    pool.connections.open()
    config = configuration(CASE, size.updates, size.batch, slots=2 * size.batch, sync_every=1)
    with (
        fakes(pool.connections.address, size, keys) as head,
        HeadLearner.connected(head, keys) as to,
    ):
        await pool.ready()
        base_mib, began_cpu_s, began_s = _peak_mib(), time.process_time(), time.monotonic()
        try:
            await run(config, size, pool, HeadLearner(to, pool, config))
            cpu_s, clock_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
        finally:
            pool.connections.close()
    samples = size.updates * size.batch
    return {
        "engines": size.engines,
        "workers": size.workers,
        "mean_s": size.mean_s,
        "samples": samples,
        "in_flight": 2 * size.batch,
        "cpu_us": round(cpu_s / samples * 1e6, 1),
        "samples_s": round(samples / clock_s, 1),
        "busy": round(cpu_s / clock_s, 2),
        "base_mib": base_mib,
        "peak_mib": _peak_mib(),
    }


async def run(config: Config, size: Size, pool: WorkerPool, learner: HeadLearner) -> None:
    """Make all updates."""
    students = _fleet("student", size.engines)
    teachers = _fleet("teacher", max(1, size.engines // 8))
    ports = Ports(
        prompts=prompts(CASE),
        rollout=RolloutGenerator(
            config, students, VOCAB_SIZE, "bench", (), sampled_by_workers(pool, students)
        ),
        teacher=FleetScorer(
            config,
            {"teacher": teachers},
            VOCAB_SIZE,
            "bench",
            None,
            scored_by_workers(pool, {"teacher": VOCAB_SIZE}),
        ),
        learner=learner,
        weight_sync=HeadWeights(learner.socket),
        observer=recorder(config, students) if size.records else silent(),
        store=pool,
    )
    controller = Controller(make_schedule(config), ports)
    freeze_objects()
    with rare_collections(make_schedule(config).permits):
        accounting = await controller.run()
    await students.close()
    await teachers.close()
    assert accounting.consumed == config.run.max_steps * config.buffer.batch_size, accounting


def recorder(config: Config, students: Fleet) -> RunRecorder:
    """Return the observer of a real run, which writes no file."""
    return RunRecorder(RunTotals(students.urls))


@dataclass
class HeadLearner:
    """Does what the controller's side of an update does."""

    socket: zmq.asyncio.Socket
    pool: WorkerPool
    config: Config

    @staticmethod
    @contextmanager
    def connected(address: str, keys: RunKeys) -> Iterator[zmq.asyncio.Socket]:
        """Connect to the head."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        SocketLimits(LARGEST).set_on(socket)
        show_keys(socket, zmq.curve_public(keys.learner), keys.learner)
        socket.connect(address)
        try:
            yield socket
        finally:
            context.destroy(linger=0)

    def prepare(self, sample: AnySample) -> AnySample:
        """Leave a sample where it is."""
        return sample

    async def train(self, batch: Batch) -> UpdateMetrics:
        """Send an update's share, and where its samples are."""
        (share,) = shares(batch, self.config.learner, self.config.estimator, 1)
        samples = [each.sample for each in share.sequences]
        parts = [(*self.pool.source(s), 0) for s in samples if isinstance(s, HeldSample)]
        assert len(parts) == len(batch.samples)
        await self.socket.send_multipart([msgspec.msgpack.encode(parts), *to_frames(share)])
        await self.socket.recv()
        return FIGURES


@dataclass
class HeadWeights(NoWeights):
    """Tells the fakes which version is live."""

    socket: zmq.asyncio.Socket

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        """Return once they answer with the version."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self.socket.send_multipart([VERSION, str(version).encode()])
        await self.socket.recv()
        now_s = clock()
        return WeightSyncReport(version, (Phase("tell", began_s, now_s),), 0, began_s, now_s)


@contextmanager
def fakes(address: str, size: Size, keys: RunKeys) -> Iterator[str]:
    """Run the fakes; yield the head's address."""
    environment = {**os.environ, RANK_VARIABLE: keys.ranks.text()}
    words = ["-m", "benchmarks.many_engines.fakes", address, str(size.workers), str(size.mean_s)]
    with subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.wait(ENDED_S)


def _fleet(role: str, count: int) -> Fleet:
    """Return a fleet of engines, which the controller itself never asks anything."""
    urls = [f"http://{role}-{i}.invalid" for i in range(count)]
    return Fleet([ServerClient(url, timeout_s=TIMEOUT_S) for url in urls])


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
