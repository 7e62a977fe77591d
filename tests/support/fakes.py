"""Fakes that drive the real controller: a virtual clock, engines with delays, a witness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_opd.metrics.types import Accounting, Depths, Phase, WeightSyncReport
from megatron_opd.records.sample_figures import CacheSize
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import (
    Batch,
    HeldRollout,
    LearnerTurn,
    Prompt,
    Rollout,
    Sample,
    VersionSpan,
)
from sglang_bridge.protocol import DrawCache


def make_prompt(uid: int, num_tokens: int = 3) -> Prompt:
    return Prompt(uid, f"p{uid}", np.arange(num_tokens, dtype=np.int32), answer=str(uid))


def make_rollout(
    prompt: Prompt,
    spans: tuple[VersionSpan, ...],
    started_s: float = 0.0,
    finished_s: float = 1.0,
    engine: str = "student-0",
) -> Rollout:
    """Two ids a row, the path token first; in every second row no draw hit the second id."""
    num_tokens = spans[-1].stop
    weight_N = np.tile(np.array([1.0, 0.0, 0.25, 0.75], np.float32), num_tokens)[: 2 * num_tokens]
    draws = DrawCache(
        offsets_T1=np.arange(num_tokens + 1, dtype=np.int64) * 2,
        ids_N=np.tile(np.array([4, 9], np.int32), num_tokens),
        weight_N=weight_N,
        sampler_logp_N=np.full(2 * num_tokens, -0.5, np.float32),
        path_T=np.arange(num_tokens, dtype=np.int64) * 2,
    )
    response_ids_T = np.full(num_tokens, 4, np.int32)
    return single_turn(prompt, response_ids_T, draws, spans, "stop", started_s, finished_s, engine)


def make_sample(uid: int, version: int = 0, num_tokens: int = 4) -> Sample:
    rollout = make_rollout(make_prompt(uid), (VersionSpan(version, 0, num_tokens),))
    return Sample(rollout, np.full(rollout.draws.num_ids, -0.7, np.float32))


def held_rollout(rollout: Rollout, key: str, cache: CacheSize) -> HeldRollout:
    """What stands for a rollout whose arrays a data worker holds."""
    return HeldRollout(
        prompt=rollout.prompt,
        worker="data worker 0",
        key=key,
        sizes=rollout.sizes,
        cache=cache,
        geometric_logps=rollout.geometric_logps,
        spans=rollout.spans,
        finish_reason=rollout.finish_reason,
        started_s=rollout.started_s,
        finished_s=rollout.finished_s,
        engine=rollout.engine,
        runs=rollout.runs,
        reward=rollout.reward,
        turns=rollout.turns,
    )


def prompts(count: int | None = None) -> Iterator[Prompt]:
    """`count` prompts, endless when None."""
    uid = 0
    while count is None or uid < count:
        yield make_prompt(uid)
        uid += 1


@dataclass
class Fleet:
    """Holds the live version; a rollout is four tokens, so a weight sync can split it."""

    duration_s: Callable[[int], float] = lambda uid: 1.0
    fail: Callable[[int], Exception | None] = lambda uid: None
    version: int = 0
    in_flight: int = 0
    max_in_flight: int = 0

    async def generate(self, prompt: Prompt) -> Rollout:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            versions = [self.version]
            for _ in range(3):
                await asyncio.sleep(self.duration_s(prompt.uid) / 3)
                versions.append(self.version)
            if (error := self.fail(prompt.uid)) is not None:
                raise error
        finally:
            self.in_flight -= 1
        spans = []
        for token, version in enumerate(versions):
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, token + 1)
            else:
                spans.append(VersionSpan(version, token, token + 1))
        return make_rollout(prompt, tuple(spans), started_s, clock())


@dataclass
class Teacher:
    duration_s: Callable[[int], float] = lambda uid: 0.5
    fail: Callable[[int], Exception | None] = lambda uid: None

    async def score(self, rollout: Rollout) -> Sample:
        await asyncio.sleep(self.duration_s(rollout.prompt.uid))
        if (error := self.fail(rollout.prompt.uid)) is not None:
            raise error
        return Sample(rollout, np.full(rollout.draws.num_ids, -0.7, np.float32))


@dataclass(frozen=True)
class Figures:
    """What a learner would report."""

    update: int = 0
    loss: float = 0.5
    reverse_kl_nats: float | None = 0.25
    grad_norm: float = 1.0
    lr: float = 1e-3
    num_response_tokens: int = 8
    num_ids: int = 16
    num_samples: int = 2
    probs_diff_max: float | None = 1e-6
    probs_diff_mean: float | None = 1e-7
    mismatch_tokens: int = 8
    probs_diff_free_max: float | None = None
    probs_diff_free_mean: float | None = None
    routing_moved_fraction: float | None = None
    ratio_p50: float = 1.0
    ratio_p99: float = 1.1
    ratio_max: float = 1.2
    truncated_fraction: float = 0.0
    forward_backward_s: float = 0.2
    optimizer_s: float = 0.1
    cpu_s: float | None = 0.25
    peak_rss_bytes: int = 1000


@dataclass
class Learner:
    duration_s: Callable[[int], float] = lambda update: 1.0
    fail: Callable[[int], Exception | None] = lambda update: None
    loss: Callable[[int], float] = lambda update: 0.5
    reverse_kl_nats: float | None = 0.25
    measures_mismatch: Callable[[int], bool] = lambda update: True
    routing: Callable[[int], dict[str, float]] = lambda update: {}
    batches: list[Batch] = field(default_factory=list)
    busy: bool = False

    def prepare(self, sample: Sample) -> Sample:
        return sample

    async def train(self, batch: Batch) -> Figures:
        assert not self.busy
        self.busy = True
        await asyncio.sleep(self.duration_s(batch.update))
        if (error := self.fail(batch.update)) is not None:
            raise error
        self.busy = False
        self.batches.append(batch)
        loss = self.loss(batch.update)
        figures = Figures(
            update=batch.update,
            loss=loss,
            reverse_kl_nats=self.reverse_kl_nats,
            **self.routing(batch.update),
        )
        if self.measures_mismatch(batch.update):
            return figures
        nothing = {"probs_diff_max": None, "probs_diff_mean": None}
        return replace(figures, mismatch_tokens=0, **nothing)


class SameServers:
    """What a fleet says to whose servers nothing happens."""

    epoch = 0
    none_serves = False

    async def let_in(self) -> None: ...

    async def until_none_serves(self) -> None:
        await asyncio.Event().wait()


@dataclass
class WeightSyncer:
    fleet: Fleet
    learner: Learner
    duration_s: Callable[[int], float] = lambda version: 0.2
    fail: Callable[[int], Exception | None] = lambda version: None
    synced: list[int] = field(default_factory=list)

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        assert not self.learner.busy
        clock = asyncio.get_running_loop().time
        started_s = clock()
        await asyncio.sleep(self.duration_s(version))
        assert not self.learner.busy
        if (error := self.fail(version)) is not None:
            raise error
        self.fleet.version = version
        self.synced.append(version)
        phases = (Phase("pause", started_s, started_s), Phase("send", started_s, clock()))
        return WeightSyncReport(version, phases, 1000, started_s, clock())

    async def until_none_serves(self) -> None:
        await asyncio.Event().wait()

    async def make_room(self) -> None:
        """The learner of these tests shares nothing."""

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Never needed: its servers are never lost."""
        await asyncio.Event().wait()


@dataclass
class Witness:
    """Observer that keeps everything and checks that what it is told is possible."""

    admitted_uids: list[int] = field(default_factory=list)
    rolled_uids: list[int] = field(default_factory=list)
    scored_uids: list[int] = field(default_factory=list)
    drops: list[tuple[int, str]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    reports: list[WeightSyncReport] = field(default_factory=list)
    depths: list[Depths] = field(default_factory=list)
    unsynced: int = 0
    accounting: Accounting | None = None

    def started(self, now_s: float, depths: Depths) -> None:
        self.depths.append(depths)

    def admitted(self, prompt: Prompt) -> None:
        self.admitted_uids.append(prompt.uid)

    def rolled_out(self, rollout: Rollout) -> None:
        self.rolled_uids.append(rollout.prompt.uid)

    def scored(self, sample: Sample, started_s: float, finished_s: float) -> None:
        self.scored_uids.append(sample.rollout.prompt.uid)

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        self.drops.append((uid, reason))

    def trained(self, batch: Batch, figures: Any, started_s: float, finished_s: float) -> None:
        assert finished_s >= started_s
        self.batches.append(batch)

    def updated(self, batch: Batch, depths: Depths) -> None:
        self.unsynced += 1

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        self.reports.append(report)

    def moved(self, depths: Depths) -> None:
        assert min(depths.rolling, depths.scoring, depths.buffered, depths.permits_in_use) >= 0
        assert depths.permits_in_use <= depths.permits
        self.depths.append(depths)

    def ended(self, accounting: Accounting, now_s: float) -> None:
        assert self.accounting is None
        self.accounting = accounting
