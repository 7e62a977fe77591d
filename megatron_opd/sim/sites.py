"""Runs simulated sampler sites behind slow links, each with its own version of the weights.

Real: each site's RolloutGenerator, FleetScorer, Fleet and WeightSync, and what a weight sync does
with its responses in flight. Modelled: the learner writes a version, which is offered at once;
a site draws how long weights are delayed, samples with what it has until that is over, then takes
the newest version (HeteroRL sec. 4.1). A finished response is scored at its site, sent on the
site's link, held back, and its slot is free again once it has arrived.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron_opd.buffer.delays import DelayStream
from megatron_opd.config.schema import Config
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.ports import TeacherScorer
from megatron_opd.metrics.types import Phase, WeightSyncReport
from megatron_opd.records.types import AnyRollout, AnySample, LearnerTurn, Prompt
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.sim.costs import SyncCost
from megatron_opd.sim.host import Host
from megatron_opd.sim.pipes import Pipe
from megatron_opd.sites.dispatcher import TooLate
from megatron_opd.weight_sync.session import WeightSync

ID_BYTES, TOKEN_BYTES = 16, 20
"""Bytes of a sample's arrays, by cached id and response token (metrics/cache_size.py); compression
is not simulated."""


@dataclass(slots=True)
class SimulatedSite:
    """Holds one site. scorer: None where the learner's site scores. slots: prompts at once.

    loads: versions that it took. samples: that it delivered.
    """

    name: str
    generator: RolloutGenerator
    scorer: TeacherScorer | None
    sync: WeightSync
    slots: int
    rollouts: Rollouts
    up: Pipe
    down: Pipe
    version: int = 0
    taken: int = 0
    loads: int = 0
    samples: int = 0
    group: int | None = None
    """The last one whose first member it was given, as the others are to follow."""
    queue: deque[_Waiting] = field(default_factory=lambda: deque[_Waiting]())

    @property
    def free(self) -> int:
        """Returns its free slots, but for those of prompts that wait for them."""
        return self.slots - self.taken - len(self.queue)


@dataclass(slots=True)
class _Waiting:
    """Holds a prompt that no site has."""

    uid: int
    found: asyncio.Future[SimulatedSite] = field(default_factory=asyncio.Future[SimulatedSite])


class SimulatedSites:
    """Acts as the controller's rollout engine, scorer and weight sync. Use in one event loop.

    scorer: of the learner's site, None where all sites score. cost: of a weight sync, whose time
    before servers are paused is what the learner takes to write a version.
    """

    def __init__(
        self,
        config: Config,
        sites: Sequence[SimulatedSite],
        scorer: TeacherScorer | None,
        cost: SyncCost,
        host: Host,
    ) -> None:
        self._config, self._sites, self._scorer, self._host = config, sites, scorer, host
        self._num_bytes = cost.num_bytes
        self._write_s = cost.sync_s - cost.paused_s
        held_s = cost.sync_s if cost.held_s is None else cost.held_s
        self._held_s = min(held_s if config.weight_sync.overlap else cost.sync_s, self._write_s)
        self._group_size = config.rollout.group_size if config.estimator.reads_groups else 1
        self._clock = asyncio.get_running_loop().time
        self._version = 0
        self._offered = asyncio.Event()
        self._waiting: deque[_Waiting] = deque()
        self._scored: dict[int, AnySample] = {}

    # ------------------------------------------------------------ samples

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Return a response once it has come from a site. TooLate."""
        site = await self._slot_for(prompt.uid)
        try:
            rollout = await site.rollouts.run(partial(site.generator.generate, prompt))
            if site.scorer is not None:
                self._scored[prompt.uid] = await site.scorer.score(rollout)
            await self._travel(site, rollout)
        except BaseException:
            self._scored.pop(prompt.uid, None)
            raise
        finally:
            site.taken -= 1
            self._hand_out()
        site.samples += 1
        return rollout

    async def score(self, rollout: AnyRollout) -> AnySample:
        """Return what came scored, or score it here."""
        sample = self._scored.pop(rollout.prompt.uid, None)
        if sample is not None:
            return sample
        assert self._scorer is not None, "a site scores nothing"
        return await self._scorer.score(rollout)

    async def _travel(self, site: SimulatedSite, rollout: AnyRollout) -> None:
        delays = DelayStream.of(self._config, site.name, "samples")
        num_bytes = ID_BYTES * rollout.num_ids + TOKEN_BYTES * rollout.num_response_tokens
        await site.up.send(num_bytes, delays.seconds(rollout.prompt.uid))
        age_s = self._clock() - rollout.finished_s
        if age_s > self._config.sites.max_delay_s:
            raise TooLate(f"{age_s:.0f} s after its end, from {site.name}")

    async def _slot_for(self, uid: int) -> SimulatedSite:
        waiting = _Waiting(uid)
        self._waiting.append(waiting)
        self._hand_out()
        return await waiting.found

    def _hand_out(self) -> None:
        """Give waiting prompts to sites, in order."""
        for site in self._sites:
            self._fill(site)
        while self._waiting:
            waiting = self._waiting[0]
            if not waiting.found.done():
                site = self._site_of(waiting)
                if site is None:
                    return
                site.group = waiting.uid // self._group_size
                site.queue.append(waiting)
                self._fill(site)
            self._waiting.popleft()

    def _fill(self, site: SimulatedSite) -> None:
        """Give a site what waits for its slots."""
        while site.queue and site.taken < site.slots:
            waiting = site.queue.popleft()
            if not waiting.found.done():
                site.taken += 1
                waiting.found.set_result(site)

    def _site_of(self, waiting: _Waiting) -> SimulatedSite | None:
        """Return the site of its group, else the one with most free slots; None: all are full."""
        for site in self._sites:
            if site.group == waiting.uid // self._group_size:
                return site
        most = max(self._sites, key=lambda site: site.free)
        return most if most.free > 0 else None

    # ------------------------------------------------------------ weights

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        """Write a version and offer it; sites take it when they do."""
        began_s = self._clock()
        await self._host.work(self._held_s)
        if self._config.weight_sync.overlap:
            turn.release()
        await self._host.work(self._write_s - self._held_s)
        self._version = version
        self._offered.set()
        self._offered = asyncio.Event()
        now_s = self._clock()
        return WeightSyncReport(
            version, (Phase("write", began_s, now_s),), self._num_bytes, now_s, now_s
        )

    async def make_room(self) -> None:
        """Return at once: sites have their own memory."""

    async def until_none_serves(self) -> None:
        """Wait for ever: a site that has no newer version samples with what it has."""
        await asyncio.Event().wait()

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Let every site take versions until cancelled."""
        async with asyncio.TaskGroup() as group:
            for site in self._sites:
                group.create_task(self._take_versions(site), name=f"site {site.name}")

    async def _take_versions(self, site: SimulatedSite) -> None:
        delays = DelayStream.of(self._config, site.name, "weights")
        while True:
            await asyncio.sleep(delays.seconds(site.loads))
            while self._version == site.version:
                await self._offered.wait()
            version = self._version
            await site.down.send(self._num_bytes)
            async with site.rollouts.held():
                await site.sync.sync(version)
            site.version, site.loads = version, site.loads + 1
