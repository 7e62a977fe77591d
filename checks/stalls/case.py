"""Runs one stall, in the controller's process; everything between servers and learner is real.

    python -m checks.stalls.case NAME WORKERS SECONDS

A run reaches a steady state, somebody stalls, the permits fill, and SECONDS later it goes on to its
end. Lines on standard output say when the seconds begin and end, and what became of the run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.data_path.parts import NoWeights, prompts
from benchmarks.data_path.servers import serving
from benchmarks.data_workers import pool_of
from checks.stalls.asked import answer_signal, say
from checks.stalls.cases import (
    BATCH,
    BY_NAME,
    CONTROL_PACE_S,
    CONTROL_SETTLE_S,
    SAMPLES,
    SETTLE_S,
    WARM_UPDATES,
    Stall,
)
from checks.stalls.outside import Outside, head
from megatron_opd.config.roles import Role
from megatron_opd.config.schema import Config
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import make_schedule
from megatron_opd.data_workers.fleet_calls import sampled_by_workers, scored_by_workers
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.launch.health import WatchedProcess
from megatron_opd.launch.processes import Processes
from megatron_opd.metrics.types import Depths, WeightSyncReport
from megatron_opd.records.types import Batch, LearnerTurn
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.run.batch_learner import BatchLearner
from megatron_opd.transport.messages import UpdateMetrics
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.wire.keys import RunKeys
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet

START_S = 600.0
# for whoever watches, to look a last time before the run goes on
LAST_LOOK_S = 3.0
TEACHER: Role = "teacher"


class Weights(NoWeights):
    """Tells the student's servers the version of weights that they keep."""

    def __init__(self, students: Fleet) -> None:
        self._students = students

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        """Do what a weight sync does, but for the weights."""
        began_s = asyncio.get_running_loop().time()
        await self._students.pause()
        await self._students.end_weight_update(version)
        await self._students.resume()
        now_s = asyncio.get_running_loop().time()
        return WeightSyncReport(version, (), 0, began_s, now_s)


@dataclass
class Watcher:
    """Observes the controller: how many samples are in flight, and what was trained on."""

    depths: Depths | None = None
    most: int = 0
    updates: int = 0
    trained_on: list[int] = field(default_factory=list[int])

    def moved(self, depths: Depths) -> None:
        """Keep the numbers, and the largest."""
        self.depths = depths
        self.most = max(self.most, in_flight(depths))

    def begin(self) -> None:
        """Look for the largest from now on."""
        assert self.depths is not None
        self.most = in_flight(self.depths)

    def trained(self, batch: Batch, figures: UpdateMetrics, *times: float) -> None:
        """Keep which prompts an update was made on."""
        self.updates += 1
        self.trained_on += [sample.rollout.prompt.uid for sample in batch.samples]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def in_flight(depths: Depths) -> int:
    """Return the samples that are held, but for those of an update under way."""
    return depths.rolling + depths.scoring + depths.buffered


class Elsewhere:
    """Stands for the processes of servers, of which there are none here."""

    def watched_server(self, url: str) -> Sequence[WatchedProcess]:
        """Return no process."""
        return ()

    def discard(self, url: str) -> None:
        """Leave the server alone."""


async def main(stall: Stall, workers: int, seconds: float) -> None:
    """Run a case."""
    answer_signal()
    keys = RunKeys.make()
    pace_s = 0.0 if stall.bounded else CONTROL_PACE_S
    with serving("checks.stalls.servers", str(pace_s)) as (*students, teacher):
        config = Config.model_validate(stall.settings(teacher))
        remote = RemoteLearner(config, Admission(keys))
        with head(remote.address, keys) as process:
            await remote.wait_ready(START_S)
            outside = Outside(students, teacher, process)
            async with pool_of(workers, keys, "checks.stalls.worker") as pool:
                await measured(stall, config, outside, remote, pool, seconds)
            if not stall.bounded:
                process.kill()
                remote.close()
                return
            await remote.stop()
            assert process.stdout is not None
            say("learner", taken=int(process.stdout.read()))


async def measured(
    stall: Stall,
    config: Config,
    outside: Outside,
    remote: RemoteLearner,
    pool: WorkerPool | None,
    seconds: float,
) -> None:
    """Make the run, with the stall in it."""
    watcher = Watcher()
    async with (
        make_fleet(config.student, outside.students) as students,
        make_fleet(config.teacher, [outside.teacher]) as teachers,
        supervised(stall, config, teachers),
    ):
        learner = BatchLearner(config, remote, pool)
        ports = ports_of(config, students, teachers, learner, watcher, pool)
        run = asyncio.create_task(Controller(make_schedule(config), ports).run())
        await until(run, lambda: watcher.updates >= WARM_UPDATES // 2)
        say("steady")
        await until(run, lambda: watcher.updates >= WARM_UPDATES)
        watcher.begin()
        await outside.stall(stall)
        await until(run, None, SETTLE_S if stall.bounded else CONTROL_SETTLE_S)
        say("begin", **figures(watcher))
        await until(run, None, seconds)
        said = figures(watcher)
        counts = {"tries_timed_out": teachers.timed_out, "tries_without_answer": teachers.restarted}
        say("end", **said, **counts)
        await until(run, None, LAST_LOOK_S)
        if not stall.bounded:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            return
        await outside.go_on()
        accounting = await run
    updates = config.run.max_steps
    say(
        "finished",
        updates=accounting.updates,
        dropped=sum(accounting.dropped.values()),
        trained_on=len(watcher.trained_on),
        lost=len(set(range(updates * BATCH)) - set(watcher.trained_on)),
        twice=len(watcher.trained_on) - len(set(watcher.trained_on)),
    )


def ports_of(
    config: Config,
    students: Fleet,
    teachers: Fleet,
    learner: BatchLearner,
    watcher: Watcher,
    pool: WorkerPool | None,
) -> Ports:
    """Put the run's parts together."""
    vocab_size = students.infos[0].vocab_size
    sample = elsewhere = None
    if pool is not None:
        sample = sampled_by_workers(pool, students)
        elsewhere = scored_by_workers(pool, {"teacher": vocab_size})
    return Ports(
        prompts=prompts(SAMPLES),
        rollout=RolloutGenerator(config, students, vocab_size, "bench", (), sample),
        teacher=FleetScorer(config, {"teacher": teachers}, vocab_size, "bench", None, elsewhere),
        learner=learner,
        weight_sync=Weights(students),
        observer=cast(Any, watcher),
        store=pool,
    )


def figures(watcher: Watcher) -> dict[str, int]:
    """Say how many samples are in flight."""
    depths = watcher.depths
    assert depths is not None
    return {
        "rolling": depths.rolling,
        "scoring": depths.scoring,
        "buffered": depths.buffered,
        "permits_in_use": depths.permits_in_use,
        "permits": depths.permits,
        "most_in_flight": watcher.most,
        "updates": watcher.updates,
    }


async def until(
    run: asyncio.Task[Any], holds: Callable[[], bool] | None, limit_s: float = 0
) -> None:
    """Wait until `holds`, or for so long; the run must not end meanwhile."""
    clock = asyncio.get_running_loop().time
    end_s = clock() + (limit_s or START_S)
    while clock() < end_s and not (holds is not None and holds()):
        await asyncio.wait((run,), timeout=0.2 if holds else end_s - clock())
        assert not run.done(), f"the run ended: {run}"
    assert holds is None or holds(), "the run reached no steady state"


@asynccontextmanager
async def supervised(stall: Stall, config: Config, teachers: Fleet) -> AsyncIterator[None]:
    """Let the run's supervisor watch the teacher, if it is to."""
    if not stall.supervised:
        yield
        return

    async def take_in(role: Role, url: str) -> ServerClient:
        client = ServerClient(url, timeout_s=config.teacher.request_timeout_s)
        teachers.add(client, await client.info())
        return client

    def tell(line: str) -> None:
        say("supervisor", said=line)

    servers = Supervisor(config, {TEACHER: teachers}, cast(Processes, Elsewhere()), take_in, tell)
    async with servers.watching():
        yield


if __name__ == "__main__":
    asyncio.run(main(BY_NAME[sys.argv[1]], int(sys.argv[2]), float(sys.argv[3])))
