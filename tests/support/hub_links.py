"""Sampler sites in memory, as the learner's site sees them: links, versions, what sites send."""

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.selection import KeepOverlong
from megatron_opd.records.types import Prompt, Sample, VersionSpan
from megatron_opd.sites.checking import SampleRules
from megatron_opd.sites.handshake import ExpectedSite
from megatron_opd.sites.hub import Hub
from megatron_opd.sites.messages import (
    PROTOCOL,
    FileSize,
    Forget,
    Gone,
    Offer,
    Serving,
    SiteDone,
    SiteHello,
    SiteTask,
    ToLearner,
    ToSite,
    Want,
    decode_to_site,
    encode,
)
from megatron_opd.sites.settings import DispatchSettings, HubSettings
from megatron_opd.transport.samples import encode_sample
from megatron_opd.wire.link.counts import LinkCounts, LinkTally
from megatron_opd.wire.link.events import Broken, Event, Mended, Received, Restarted
from megatron_opd.wire.link.wire import URGENT
from sglang_bridge.arrays import unpack
from tests.support.delays import Delays
from tests.support.fakes import make_prompt, make_rollout

VOCAB_SIZE = 16
RULES = SampleRules(Estimator(), VOCAB_SIZE, 8, KeepOverlong())
EXPECTED = ExpectedSite({"a": "b"}, 1, 2, 9, (1, 7), 30.0)
NO_COUNTS = LinkCounts(True, None, None, 0.0, 0, **dataclasses.asdict(LinkTally()))
OFFER = Offer(1, "v", None, [FileSize("f", 1, b"")])


def sample_of(prompt: Prompt, version: int = 0, tokens: int = 4) -> Sample:
    """A scored sample of a prompt, sampled with one version."""
    rollout = make_rollout(prompt, (VersionSpan(version, 0, tokens),))
    draws = rollout.draws
    logp_N = np.full(draws.num_ids, -0.8, np.float32)  # of two ids a row
    rollout = replace(rollout, draws=replace(draws, sampler_logp_N=logp_N))
    return Sample(rollout, np.full(rollout.draws.num_ids, -0.7, np.float32))


def done_of(uid: int, **changes: Any) -> SiteDone:
    """A Done as a sound site sends it."""
    healthy = SiteDone(uid, "stop", 0.0, time.time(), 1.0, "there", 0, None, None, 0.0, False)
    return replace_record(healthy, **changes)


def replace_record(record: Any, **changes: Any) -> Any:
    return type(record)(**{f: changes.get(f, getattr(record, f)) for f in record.__struct_fields__})


class FakeLinks:
    """All links of the learner's site; the test is all sites. told: what each was sent."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.told: dict[str, list[ToSite]] = {}
        self.offset_s: float | None = 0.0
        self.waiting: set[str] = set()

    async def next(self) -> Event:
        return await self.events.get()

    async def send(self, peer: str, parts: Sequence[Any], lane: int = URGENT) -> None:
        self.told.setdefault(peer, []).append(decode_to_site(parts[0]))

    def counts(self, peer: str) -> LinkCounts:
        waiting_bytes = 100 if peer in self.waiting else 0
        return replace(NO_COUNTS, clock_offset_s=self.offset_s, waiting_bytes=waiting_bytes)


class FakeVersions:
    """Offers `newest` to who joins, if there is one."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self.send, self.newest = send, None
        self.here: list[str] = []
        self.num_bytes = Counter[str]()
        self.wanted: list[Want] = []

    async def joined(self, site: str) -> None:
        self.here.append(site)
        if self.newest is not None:
            await self.send(site, replace_record(OFFER, version=self.newest))

    async def left(self, site: str) -> None:
        self.here.remove(site)

    async def start_over(self) -> None:
        self.here, self.newest = [], None

    def wants(self, site: str, want: Want) -> None:
        self.wanted.append(want)

    async def offer(self, version: int) -> None:
        self.newest = version
        for site in self.here:
            await self.send(site, replace_record(OFFER, version=version))


class Sites:
    """A hub whose sites the test plays; use it inside the event loop."""

    def __init__(self, names: Sequence[str] = ("a", "b"), slots: int = 2, **settings: Any) -> None:
        self.links, self.said = FakeLinks(), list[str]()
        own = {"lost_after_s": 0.0, "quarantine_after": 3}
        kept = {key: settings.pop(key, value) for key, value in own.items()}
        scores = settings.pop("scores", True)
        scorer, delays = settings.pop("scorer", None), settings.pop("delays", Delays())
        dispatch = {"group_size": 1, "max_delay_s": 100.0, "bound": 4} | settings
        self.settings = HubSettings(dict.fromkeys(names, slots), 10, "run", **kept)
        self.dispatch = DispatchSettings(dict.fromkeys(names, scores), **dispatch)
        self.processes = 0
        self.hub = Hub(
            self.settings,
            self.dispatch,
            EXPECTED,
            RULES,
            self.links,
            dict.fromkeys(names, delays),
            scorer,
            self.said.append,
        )
        self.dispatcher = self.hub.dispatcher
        self.versions = self.hub.versions = FakeVersions(self.hub.send)
        self.scores = scores
        self.serving = asyncio.create_task(self.hub.serve())
        self.tasks: dict[int, asyncio.Task[Any]] = {}

    async def __aenter__(self) -> "Sites":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self.serving, *self.tasks.values()):
            task.cancel()
        await asyncio.gather(self.serving, *self.tasks.values(), return_exceptions=True)

    async def turns(self) -> None:
        """Let everything happen that can."""
        for _ in range(12):
            await asyncio.sleep(0)

    async def ask(self, *uids: int) -> None:
        """Ask for prompts, as the controller does."""
        for uid in uids:
            self.tasks[uid] = asyncio.create_task(self.dispatcher.generate(make_prompt(uid)))
        await self.turns()

    def got(self, uid: int) -> Any:
        """What the controller was given for a prompt; InvalidStateError: nothing yet."""
        return self.tasks[uid].result()

    async def say(self, site: str, message: ToLearner, *frames: Any) -> None:
        self.links.events.put_nowait(Received(site, URGENT, (encode(message), *frames)))
        await self.turns()

    async def garbage(self, site: str, *parts: bytes) -> None:
        self.links.events.put_nowait(Received(site, URGENT, parts))
        await self.turns()

    async def happens(self, kind: type[Any], site: str) -> None:
        self.links.events.put_nowait(kind(site))
        await self.turns()

    async def comes(self, name: str, *, slots: int = 2, holds: Sequence[int] = (), **changes: Any):
        """Let a new process of a site introduce itself."""
        await self.happens(Restarted, name)
        self.processes += 1
        await self.greets(name, slots=slots, holds=holds, **changes)

    async def greets(self, name: str, *, slots: int = 2, holds: Sequence[int] = (), **changes: Any):
        """Let the process of a site that is there introduce itself."""
        who, kept = (PROTOCOL, name, f"p{self.processes}"), list(holds)
        hello = SiteHello(*who, slots, self.scores, {"a": "b"}, 1, 2, 9, [1, 7], time.time(), kept)
        await self.say(name, replace_record(hello, **changes))

    async def start_over(self, **state: Any) -> None:
        """Go on from a checkpoint, with another learner. state: see DispatchSettings."""
        await self.versions.start_over()
        settings = replace(self.settings, run="run after a loss")
        self.hub.start_over(settings, replace(self.dispatch, **state), None)
        self.dispatcher = self.hub.dispatcher
        await self.turns()

    async def breaks(self, site: str) -> None:
        await self.happens(Broken, site)
        await asyncio.sleep(0.01)  # lost_after_s is 0
        await self.turns()

    async def mends(self, site: str) -> None:
        await self.happens(Mended, site)

    async def serves(self, site: str, version: int) -> None:
        await self.say(site, Serving(version))

    async def finishes(self, site: str, uid: int, version: int = 0, **changes: Any) -> Sample:
        """Let a site deliver a sound sample of a prompt."""
        sample = sample_of(make_prompt(uid), version)
        await self.say(site, done_of(uid, **changes), *encode_sample(sample))
        return sample

    async def fails(self, site: str, uid: int, reason: str) -> None:
        await self.say(site, Gone(uid, reason, "why"))

    def told(self, site: str, kind: type[Any]) -> list[Any]:
        return [each for each in self.links.told.get(site, []) if type(each) is kind]

    def given(self, site: str) -> list[int]:
        return [task.uid for task in self.told(site, SiteTask)]

    def forgotten(self, site: str) -> list[int]:
        return [uid for each in self.told(site, Forget) for uid in each.uids]

    def figures(self, site: str):
        return self.hub.figures[site]


def prompt_ids(task: SiteTask) -> list[int]:
    return unpack(task.ids, "<i4").tolist()
