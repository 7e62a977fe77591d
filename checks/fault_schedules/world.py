"""One run of the code that ships, on simulated processes, while these fail at random moments.

Real: the controller with its permits and buffer, RolloutGenerator, FleetScorer, Fleet, WeightSync,
Supervisor and the guard. Simulated: the servers, the learner, the transport and the clock.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from checks.fault_schedules.servers import (
    INITIAL,
    REQUEST_S,
    VOCABULARY,
    Client,
    Server,
    State,
    paces,
)
from megatron_opd.config.schema import Config
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import Schedule
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.controller.snapshot_codec import decode_state, encode_state
from megatron_opd.errors import LearnerError
from megatron_opd.fleet.guards import RunGuard
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.launch.health import HealthGuard, WatchedProcess
from megatron_opd.records.types import Batch, Prompt, Sample
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.run.recover import with_recovery
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.errors import ServerDied, WeightSyncFailed
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import WeightPiece

STUDENT, TEACHER, RUN_ID = "student", "teacher", "run"
Without = Literal["readmission", "learner_restarts", "deadlines"]
SILENT = ("hung", "jammed", "stalled")
"""Faults after which a request makes no progress, and nothing else does that."""


STATES: dict[str, State] = {"killed": "dead", "hung": "hung", "jammed": "jammed"}


@dataclass(frozen=True)
class Plan:
    """Says what one run is like.

    faults: (seconds, what, whom). slots: requests that a server works on at once. pace_s: a step's
    mean time. poison: a prompt that no server can sample. without: what mends failures and a
    control lacks.
    """

    seed: int
    schedule: Schedule
    students: int
    teachers: int
    checkpoint_every: int
    faults: tuple[tuple[float, str, str], ...]
    slots: int = 64
    pace_s: float = 0.2
    poison: int | None = None
    without: Without | None = None


class Learner:
    """Counts its weights up with every update. history: {version: number of its weights}."""

    def __init__(self, pace: Any) -> None:
        self._pace, self._numbers = pace, itertools.count(INITIAL + 1)
        self.weights = INITIAL
        self.history = {0: INITIAL}
        self.failure: LearnerError | None = None
        self.died = asyncio.Event()
        self.trained: list[list[int]] = []
        self.saved: dict[int, tuple[bytes, int]] = {}

    def die(self) -> None:
        """End; whatever is asked now fails."""
        self.failure = LearnerError("learner rank 0 is gone", final=False)
        self.died.set()

    async def failed(self) -> LearnerError:
        """Wait for its end."""
        await self.died.wait()
        assert self.failure is not None
        return self.failure

    async def step(self) -> None:
        """Take a step of work, or fail."""
        await asyncio.sleep(self._pace())
        if self.failure is not None:
            raise self.failure

    def prepare(self, sample: Sample) -> Sample:
        """Keep it as it is."""
        return sample

    async def train(self, batch: Batch) -> Any:
        """Check where the tokens come from, and make new weights."""
        for sample in batch.samples:
            ids_T = sample.rollout.response_ids_T
            for span in sample.rollout.spans:
                for token in ids_T[span.start : span.stop]:
                    assert self.history[span.version] == token, "a version that never was"
        await self.step()
        self.weights = next(self._numbers)
        assert batch.update == len(self.trained), "an update is missing or made twice"
        self.trained.append([sample.rollout.prompt.uid for sample in batch.samples])
        return SimpleNamespace(loss=0.5, grad_norm=1.0)

    async def piece_digests(self, pieces: Sequence[WeightPiece]) -> list[str]:
        """See transport.zmq.RemoteLearner."""
        await self.step()
        return [str(self.weights)] * len(pieces)

    def start_over(self) -> ControllerState:
        """Be another learner, with the last checkpoint; return the controller's part of it."""
        self.failure, self.died = None, asyncio.Event()
        updates = max(self.saved, default=0)
        state, self.weights = NOTHING_YET, INITIAL
        if updates:
            encoded, self.weights = self.saved[updates]
            state = decode_state(encoded)
        self.trained = self.trained[:updates]
        self.history = {v: w for v, w in self.history.items() if v <= state.version}
        return state


class Transport:
    """Puts the learner's weights into the servers that it is connected to."""

    tensors = frozenset({"w"})
    num_bytes = 4
    stages = False

    def __init__(self, world: World) -> None:
        self._world = world
        self._connected: tuple[str, ...] = ()

    async def open(self) -> None:
        """Connect."""
        self._connected = self._world.fleets[STUDENT].urls
        await self._each()

    reopen = open

    async def send(self, version: int) -> None:
        """Move the weights of `version`."""
        learner = self._world.learner
        await learner.step()
        learner.history[version] = learner.weights
        for server in await self._each():
            server.weights = learner.weights

    async def stage(self, version: int) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def _each(self) -> list[Server]:
        found = [self._world.servers[url] for url in self._connected]
        for server in found:
            try:
                await server.work()
            except Exception as error:
                raise WeightSyncFailed(f"{server.url}: {error}", [server.url]) from error
        return found


class World:
    """The processes of one run, its faults, and what came of it."""

    def __init__(self, plan: Plan, config: Config) -> None:
        self.plan, self.config = plan, config
        self.random = random.Random(plan.seed)
        urls = {
            role: [f"http://{role}-{i}:1" for i in range(count)]
            for role, count in ((STUDENT, plan.students), (TEACHER, plan.teachers))
        }
        pace = paces(self.random, plan.pace_s)
        self._unlimited = plan.without == "deadlines"
        poison = "none" if plan.poison is None else f"{RUN_ID}-{plan.poison}-"
        self.servers = {
            url: Server(url, pace, plan.slots, poison) for found in urls.values() for url in found
        }
        self.fleets = {
            role: Fleet([self._client(url) for url in found]) for role, found in urls.items()
        }
        self.learner = Learner(paces(self.random, 0.5))
        self.supervisor = Supervisor(config, self.fleets, self, self.take_in, lambda line: None)
        self.happened: Counter[str] = Counter()
        self.learner_restarts = self.rolled_back = 0

    # what Supervisor asks of processes

    def watched_server(self, url: str) -> list[WatchedProcess]:
        """See fleet.supervisor.ServerProcesses."""
        server = self.servers[url]
        return [WatchedProcess(url, lambda: -9 if server.state == "dead" else None)]

    def discard(self, url: str) -> None:
        """See fleet.supervisor.ServerProcesses."""
        self.servers[url].become("dead")

    async def put_another(self, url: str) -> str:
        """See fleet.supervisor.ServerProcesses."""
        self.discard(url)
        return url

    async def start_one(self, url: str, timeout_s: float) -> None:
        """See fleet.supervisor.ServerProcesses. One start of five fails."""
        await asyncio.sleep(self.random.uniform(1.0, 10.0))
        if self.random.random() < 0.2:
            raise ServerDied(f"{url} ended with status 1")
        self.servers[url].become("up")

    async def take_in(self, role: str, url: str) -> Any:
        """Add a server to its fleet again."""
        client = self._client(url)
        self.fleets[role].add(client, await client.info())
        return client

    def _client(self, url: str) -> Client:
        return Client(self.servers[url], math.inf if self._unlimited else REQUEST_S)

    # the run

    async def run(self) -> dict[str, Any]:
        """Make all updates, whatever happens meanwhile; return what came of it."""
        clock = asyncio.get_running_loop().time
        for fleet in self.fleets.values():
            await fleet.start()
        faults = asyncio.create_task(self._fail())
        try:
            async with self.supervisor.watching():
                accounting = await self._train()
        finally:
            faults.cancel()
            await asyncio.gather(faults, return_exceptions=True)
            for fleet in self.fleets.values():
                await fleet.close()
        consumed = [uid for batch in self.learner.trained for uid in batch]
        assert len(consumed) == len(set(consumed)), "a sample is trained on twice"
        assert accounting.updates == len(self.learner.trained) == self.plan.schedule.updates
        assert accounting.in_flight == 0
        dropped, timed_out = accounting.dropped, sum(f.timed_out for f in self.fleets.values())
        assert accounting.admitted == accounting.consumed + sum(dropped.values())
        attempts = self.config.rollout.attempts
        assert set(dropped) <= {"timed_out", "teacher_timed_out"}, f"prompts are lost: {dropped}"
        assert attempts * sum(dropped.values()) <= timed_out, "prompts are given up too soon"
        silent = {whom for _, what, whom in self.plan.faults if what in SILENT}
        sound = [s for url, s in self.servers.items() if url not in silent]
        slow = sum(server.timed_out for server in sound)
        assert slow == 0 or self.plan.poison is not None, "a queue or a pause counts"
        return {
            "seconds": clock(),
            "happened": dict(self.happened),
            "servers_restarted": self.supervisor.restarted.total(),
            "learner_restarts": self.learner_restarts,
            "updates_rolled_back": self.rolled_back,
            "samples_readmitted": sum(fleet.restarted for fleet in self.fleets.values()),
            "requests_timed_out": timed_out,
            "dropped": sum(dropped.values()),
        }

    async def _train(self) -> Any:
        student, learner = self.fleets[STUDENT], self.learner
        settings = self.config.weight_sync
        sync = WeightSync(student, learner, Transport(self), settings, self.supervisor.lose)
        await sync.open()
        controller: Controller | None = None
        state = NOTHING_YET

        async def attempt() -> Any:
            nonlocal controller
            controller = self._controller(sync, state)
            return await controller.run()

        async def recover() -> None:
            nonlocal controller, state
            await asyncio.sleep(self.random.uniform(2.0, 20.0))
            state = learner.start_over()
            self.learner_restarts += 1
            if controller is not None:
                self.rolled_back += controller.accounting.updates - state.updates
                controller = None
            await sync.start_over()
            await sync.sync(state.version)

        async def lost(error: Exception) -> bool:
            return learner.failure is not None and self.plan.without != "learner_restarts"

        return await with_recovery(attempt, recover, lost)

    def _controller(self, sync: WeightSync, state: ControllerState) -> Controller:
        student: Any = self.fleets[STUDENT]
        if self.plan.without == "readmission":
            student = Once(student)
        ports = Ports(
            prompts=map(_prompt, itertools.count(state.next_uid)),
            rollout=RolloutGenerator(self.config, student, VOCABULARY, RUN_ID, ()),
            teacher=FleetScorer(self.config, self.fleets, VOCABULARY, RUN_ID),
            learner=self.learner,
            weight_sync=sync,
            observer=Silent(),
            guard=RunGuard(HealthGuard, self.learner, self.supervisor),  # type: ignore[arg-type]
            keeper=Keeper(self.learner, self.plan.checkpoint_every),
        )
        return Controller(self.plan.schedule, ports, state)

    async def _fail(self) -> None:
        began_s = asyncio.get_running_loop().time()
        for at_s, what, whom in self.plan.faults:
            await asyncio.sleep(began_s + at_s - asyncio.get_running_loop().time())
            if whom == "learner":
                if self.learner.failure is None:
                    self.happened["learner killed"] += 1
                    self.learner.die()
            elif self.servers[whom].state == "up":
                self.happened[f"{whom.split('-')[0].removeprefix('http://')} {what}"] += 1
                if what == "stalled":
                    self.servers[whom].stalls += 1
                else:
                    self.servers[whom].become(STATES[what])


class Once:
    """A fleet whose lost requests nobody repeats: the control, which must fail."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def generate(self, request: Any) -> Any:
        """Ask once."""
        try:
            return await self._fleet.generate(request)
        except Exception as error:
            raise RuntimeError(str(error)) from error


class Keeper:
    """Keeps every n-th state, with the learner's weights."""

    def __init__(self, learner: Learner, every: int) -> None:
        self._learner, self._every = learner, every

    def due(self, updates: int) -> bool:
        """Return whether this one is kept."""
        return updates % self._every == 0

    async def after_update(self, updates: int, state: Any) -> None:
        """Keep it."""
        self._learner.saved[updates] = encode_state(await state()), self._learner.weights
        await self._learner.step()


class Silent:
    """Observes nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def _prompt(uid: int) -> Prompt:
    return Prompt(uid, f"p{uid}", np.arange(3, dtype=np.int32))
