"""Servers, teacher and learner of one run on a virtual clock, around the real controller.

A rollout has four tokens, each labelled with the version of its server at that moment, so that a
weight sync can split it. A server that goes down loses what it samples, which is sampled anew; one
that comes back serves once it holds the live version.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from checks.schedule_properties.plans import Plan
from megatron_opd.buffer.rejection import RolloutRejected, ScoreRejected
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Batch, LearnerTurn, Prompt, Rollout, Sample, VersionSpan
from sglang_bridge.protocol import DrawCache

TOKENS = 4
PROMPT_IDS, RESPONSE_IDS = np.arange(3, dtype=np.int32), np.full(TOKENS, 4, np.int32)
LOGP = np.full(TOKENS, -0.5, np.float32)
DRAWS = DrawCache(
    offsets_T1=np.arange(TOKENS + 1, dtype=np.int64),
    ids_N=RESPONSE_IDS,
    weight_N=np.ones(TOKENS, np.float32),
    sampler_logp_N=LOGP,
    path_T=np.arange(TOKENS, dtype=np.int64),
)


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
        self.restarts = 0

    @property
    def sampling(self) -> int:
        """Returns how many rollouts are being sampled."""
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
        started_s, seconds, restarts = clock(), self._plan.rollout_s(prompt.uid), 0
        while (versions := await self._sample(seconds)) is None:
            restarts += 1
        self.restarts += restarts
        if self._plan.loses(prompt.uid):
            raise RolloutRejected("lost")
        starts = [i for i in range(TOKENS) if i == 0 or versions[i] != versions[i - 1]]
        spans = tuple(
            VersionSpan(versions[start], start, stop)
            for start, stop in zip(starts, [*starts[1:], TOKENS], strict=True)
        )
        rollout = single_turn(prompt, RESPONSE_IDS, DRAWS, spans, "stop", started_s, clock())
        return replace(rollout, restarts=restarts)

    async def _sample(self, seconds: float) -> list[int] | None:
        await self.until(lambda: self.serving)
        server = self._random.choice(self.serving)
        losses = server.losses
        server.sampling += 1
        try:
            versions = [server.version]
            for _ in range(TOKENS - 1):
                await asyncio.sleep(seconds / (TOKENS - 1))
                if server.losses != losses:
                    return None
                versions.append(server.version)
            return versions
        finally:
            if server.losses == losses:
                server.sampling -= 1


class Teacher:
    """Scores rollouts, or rejects them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    async def score(self, rollout: Rollout) -> Sample:
        """Return constant log-probs."""
        await asyncio.sleep(self._plan.score_s(rollout.prompt.uid))
        if self._plan.rejects(rollout.prompt.uid):
            raise ScoreRejected("nan")
        return Sample(rollout, LOGP, self._plan.rewards(rollout.prompt.uid))


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
    """Brings versions to the servers. at: (version, rollouts being sampled when it began)."""

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
