"""Servers, teacher and learner of one run on a virtual clock, around the real controller.

A turn has four tokens, each labelled with the version of its server at that moment, so that a
weight sync can split it; a rollout is one turn, or several with an environment's answers between. A
server that goes down loses the turns that it samples, which are sampled anew; one that comes back
serves once it holds the live version. A trajectory goes back to the server of its turn before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np

from checks.schedule_properties.plans import Plan
from megatron_opd.buffer.rejection import RolloutRejected, ScoreRejected
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.records.runs import SampledRun
from megatron_opd.records.types import Batch, LearnerTurn, Prompt, Rollout, Sample, VersionSpan
from sglang_bridge.protocol import DrawCache

TOKENS, GIVEN = 4, 2
"""Sampled tokens of a turn, and given ones between two turns."""
PROMPT_IDS = np.arange(3, dtype=np.int32)
LOST = "lost"


@cache
def draws_of(turns: int) -> DrawCache:
    """Return the cache of so many turns."""
    count = turns * TOKENS
    return DrawCache(
        offsets_T1=np.arange(count + 1, dtype=np.int64),
        ids_N=np.full(count, 4, np.int32),
        weight_N=np.ones(count, np.float32),
        sampler_logp_N=np.full(count, -0.5, np.float32),
        path_T=np.arange(count, dtype=np.int64),
    )


@cache
def sequence_of(turns: int) -> tuple[np.ndarray, tuple[SampledRun, ...]]:
    """Return the ids of so many turns, and which of them were sampled."""
    first, each = len(PROMPT_IDS), TOKENS + GIVEN
    starts = [first + turn * each for turn in range(turns)]
    runs = tuple(SampledRun(0, at, at + TOKENS, turn) for turn, at in enumerate(starts))
    ids_S = np.full(runs[-1].stop, 4, np.int32)
    ids_S[:first] = PROMPT_IDS
    return ids_S, runs


class SyncFailed(RuntimeError):
    """Reports a weight sync that failed for good."""


def make_prompt(uid: int) -> Prompt:
    """Return a prompt."""
    return Prompt(uid, "", PROMPT_IDS)


@dataclass(slots=True)
class Server:
    """One server: what it samples with, and how often it was lost."""

    version: int
    up: bool = True
    serving: bool = True
    losses: int = 0
    sampling: int = 0


class Servers:
    """All servers of the student: the rollout engine."""

    def __init__(self, plan: Plan, version: int) -> None:
        self.all = [Server(version) for _ in range(plan.servers)]
        self._plan = plan
        self._random = random.Random(0)
        self._changed = asyncio.Event()
        self.restarts = self.failures = 0
        self.turns: Rollouts | None = None
        self._slots = asyncio.Semaphore(1)
        if plan.answers is not None:
            self.turns = Rollouts(plan.schedule.in_flight, self)
            self._slots = asyncio.Semaphore(plan.answers.slots)

    @property
    def sampling(self) -> int:
        """Returns how many turns are being sampled."""
        return sum(server.sampling for server in self.all)

    @property
    def serving(self) -> list[Server]:
        """Returns the servers that hold the live version."""
        return [server for server in self.all if server.serving]

    async def until(self, condition: Callable[[], Any]) -> None:
        """Return once `condition` holds; it is looked at when a server changes."""
        while not condition():
            await self._changed.wait()

    async def until_none_serves(self) -> None:
        """Return once no server serves."""
        await self.until(lambda: not self.serving)

    def lose(self, server: Server) -> None:
        """Take a server down, with all that it samples."""
        server.up = server.serving = False
        server.losses += 1
        server.sampling = 0
        self._now_changed()

    def come_back(self, server: Server) -> None:
        """Start a server again; it has no weights yet."""
        server.up = True
        self._now_changed()

    def hold(self, version: int) -> None:
        """Let every server that is up serve `version`."""
        for server in self.all:
            if server.up:
                server.version, server.serving = version, True
        self._now_changed()

    def _now_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def faults(self) -> None:
        """Take servers down as planned, and start them again."""
        clock = asyncio.get_running_loop().time
        events = [(at_s, True, which) for at_s, which, _ in self._plan.down]
        events += [(at_s + for_s, False, which) for at_s, which, for_s in self._plan.down]
        for at_s, goes, which in sorted(events):
            await asyncio.sleep(max(0.0, at_s - clock()))
            (self.lose if goes else self.come_back)(self.all[which])
        for server in self.all:  # those that overlapped
            if not server.up:
                self.come_back(server)

    async def generate(self, prompt: Prompt) -> Rollout:
        """Sample, and sample anew what is lost with its server."""
        clock = asyncio.get_running_loop().time
        started_s, versions, restarts, server = clock(), list[int](), 0, None
        answers = self._plan.answers
        turns = 1 if answers is None else answers.turns(prompt.uid)
        for turn in range(turns):
            if turn:
                await self.answer(prompt.uid)
            sampled, server, again = await self._turn(prompt.uid, server)
            versions += sampled
            restarts += again
        self.restarts += restarts
        if self._plan.loses(prompt.uid):
            raise RolloutRejected(LOST)
        ids_S, runs = sequence_of(turns)
        draws, spans = draws_of(turns), _spans(versions)
        return Rollout(
            prompt, (ids_S,), runs, draws, spans, "stop", started_s, clock(), restarts=restarts
        )

    async def answer(self, uid: int) -> None:
        """Let the environment answer a turn, or fail."""
        answers = self._plan.answers
        assert answers is not None
        await asyncio.sleep(answers.seconds())
        if answers.fails(uid):
            self.failures += 1
            raise RolloutRejected(LOST)

    async def _turn(self, uid: int, last: Server | None) -> tuple[list[int], Server, int]:
        """Sample a turn, on the server of the one before it if that serves."""
        seconds, restarts = self._plan.rollout_s(uid), 0

        async def once() -> tuple[list[int], Server, int]:
            nonlocal restarts
            while (found := await self._sample(seconds, last)) is None:
                restarts += 1
            return *found, restarts

        if self.turns is None:
            return await once()
        async with self._slots:
            (versions, server, lost), aborted = await self.turns.counted(once)
        return versions, server, lost + aborted

    async def _sample(self, seconds: float, last: Server | None) -> tuple[list[int], Server] | None:
        await self.until(lambda: self.serving)
        again = last is not None and last.serving
        server = last if last is not None and again else self._random.choice(self.serving)
        losses = server.losses
        server.sampling += 1
        try:
            versions = [server.version]
            for _ in range(TOKENS - 1):
                await asyncio.sleep(seconds / (TOKENS - 1))
                if server.losses != losses:
                    return None
                versions.append(server.version)
            return versions, server
        finally:
            if server.losses == losses:
                server.sampling -= 1


def _spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    found, start = list[VersionSpan](), 0
    for version, tokens in groupby(versions):
        stop = start + len(list(tokens))
        found.append(VersionSpan(version, start, stop))
        start = stop
    return tuple(found)


class Teacher:
    """Scores rollouts, or rejects them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    async def score(self, rollout: Rollout) -> Sample:
        """Return constant log-probs."""
        await asyncio.sleep(self._plan.score_s(rollout.prompt.uid))
        if self._plan.rejects(rollout.prompt.uid):
            raise ScoreRejected("nan")
        logp_N = rollout.draws.sampler_logp_N
        return Sample(rollout, logp_N, self._plan.rewards(rollout.prompt.uid))


class Learner:
    """Counts batches; never two at once, and none while a weight sync has its weights."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.busy = False
        self.taken = False

    def prepare(self, sample: Sample) -> Sample:
        """Keep it as it is."""
        return sample

    async def train(self, batch: Batch) -> Any:
        """Take its time."""
        assert not self.busy, "two updates at once"
        assert not self.taken, "an update runs while a weight sync reads the weights"
        self.busy = True
        await asyncio.sleep(self._plan.train_s(batch.update))
        self.busy = False
        return SimpleNamespace(loss=0.5, grad_norm=1.0)


class Syncer:
    """Brings versions to the servers. at: (version, turns being sampled when it began)."""

    def __init__(self, plan: Plan, servers: Servers, learner: Learner) -> None:
        self._plan, self._servers, self._learner = plan, servers, learner
        self.at: list[tuple[int, int]] = []
        self.synced: list[int] = []
        self._syncing = asyncio.Lock()

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        """Bring `version` to every server that is up; wait for one if none is."""
        assert not self._syncing.locked(), "two weight syncs at once"
        async with self._syncing:
            return await self._sync(version, turn)

    async def _sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        plan, servers, learner = self._plan, self._servers, self._learner
        clock = asyncio.get_running_loop().time
        started_s, seconds = clock(), plan.sync_s(version)
        self.at.append((version, servers.sampling))
        self._read(taken=True)
        await asyncio.sleep(seconds / 2)
        if version == plan.fatal_sync:
            raise SyncFailed(f"version {version}")
        if version in plan.losing_syncs:
            lost = servers.all[version % len(servers.all)]
            servers.lose(lost)
            await asyncio.sleep(seconds)
            servers.come_back(lost)
        self._read(taken=False)
        if plan.overlap:
            turn.release()
        await asyncio.sleep(seconds / 2)
        if plan.overlap and version % 2:
            await turn.take_back()
            assert not learner.busy, "the learner was taken back during an update"
        await servers.until(lambda: any(server.up for server in servers.all))
        servers.hold(version)
        self.synced.append(version)
        return WeightSyncReport(version, (), 0, started_s, clock())

    def _read(self, *, taken: bool) -> None:
        assert not self._learner.busy, "a weight sync reads the weights during an update"
        self._learner.taken = taken

    async def make_room(self) -> None:
        """Do nothing: servers and learner share nothing."""

    async def until_none_serves(self) -> None:
        """See ports.WeightSyncer."""
        await self._servers.until_none_serves()

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Bring the current version to servers that came back when no other is left."""
        servers = self._servers
        while True:
            await servers.until_none_serves()
            await servers.until(lambda: any(server.up for server in servers.all))
            async with learner:
                version = current()
                idle = not self._syncing.locked()  # a weight sync may want the learner back
                if idle and not servers.serving and version is not None:
                    servers.hold(version)
            await asyncio.sleep(0.1)
