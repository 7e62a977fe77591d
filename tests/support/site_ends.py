"""The two ends of a sampler site, in memory: a learner at its link, servers that hold versions."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.records.types import (
    AnyRollout,
    Prompt,
    Rollout,
    Sample,
    VersionSpan,
    rollout_here,
)
from megatron_opd.sites.learner_watchdog import LearnerTimeouts
from megatron_opd.sites.messages import (
    PROTOCOL,
    FilePiece,
    Offer,
    SiteHello,
    SiteTask,
    SiteWelcome,
    ToLearner,
    ToSite,
    Want,
    decode_to_learner,
    encode,
)
from megatron_opd.sites.mirror import Mirror
from megatron_opd.sites.outbox import SiteOutbox
from megatron_opd.sites.ports import SiteLink
from megatron_opd.sites.sampling import SiteSampling
from megatron_opd.sites.site import Site
from megatron_opd.sites.site_weights import SiteWeights
from megatron_opd.wire.link.counts import LinkCounts, LinkTally
from megatron_opd.wire.link.events import Broken, Event, Mended, Received, Restarted
from megatron_opd.wire.link.wire import BULK, URGENT
from sglang_bridge.arrays import pack
from tests.support.delays import Delays
from tests.support.fakes import make_prompt, make_rollout
from tests.support.site_versions import Written

LEARNER = "learner"
LONG = LearnerTimeouts("tcp://learner:1", 600.0, 600.0)
HELLO = SiteHello(PROTOCOL, "here", "p1", 2, True, {"a": "b"}, 1, 2, 9, [1, 7], 0.0, [])


def task_of(uid: int) -> SiteTask:
    prompt = make_prompt(uid)
    ids = pack(prompt.token_ids_P)
    return SiteTask(uid, "", ids, "4", "teacher", None, (), None, "row", uid, 1.0, 1.0)


class FakeLink:
    """A link's end at a site; the test is the learner."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.sent: list[tuple[ToLearner, tuple[bytes, ...]]] = []
        self.lanes: list[int] = []
        self.answer: Callable[[ToLearner], None] = lambda message: None

    async def next(self) -> Event:
        return await self._events.get()

    async def send(self, parts: Sequence[Any], lane: int = URGENT) -> None:
        message = decode_to_learner(parts[0])
        self.sent.append((message, tuple(bytes(part) for part in parts[1:])))
        self.lanes.append(lane)
        self.answer(message)

    def counts(self) -> LinkCounts:
        return LinkCounts(True, None, None, 0.0, 0, **asdict(LinkTally()))

    def tell(self, message: ToSite, *frames: bytes) -> None:
        lane = BULK if frames else URGENT
        self._events.put_nowait(Received(LEARNER, lane, (encode(message), *frames)))

    def garbage(self, *parts: bytes) -> None:
        self._events.put_nowait(Received(LEARNER, URGENT, parts))

    def starts(self) -> None:
        self._events.put_nowait(Restarted(LEARNER))

    def breaks(self) -> None:
        self._events.put_nowait(Broken(LEARNER))

    def mends(self) -> None:
        self._events.put_nowait(Mended(LEARNER))

    def got(self, kind: type[Any]) -> list[Any]:
        return [message for message, _ in self.sent if type(message) is kind]


class Servers:
    """A site's servers: they sample when told, with the version they hold."""

    def __init__(self) -> None:
        self.version = 0
        self.is_open = False
        self.taken: list[str] = []
        self.asked: list[int] = []
        self.rejects: set[int] = set()
        self.breaks: dict[int, Exception] = {}
        self.gates: dict[int, asyncio.Event] = {}
        self._chosen = ""

    def hold(self, *uids: int) -> None:
        """Let these prompts take until `gates` says that they are done."""
        self.gates |= {uid: asyncio.Event() for uid in uids}

    async def generate(self, prompt: Prompt) -> Rollout:
        self.asked.append(prompt.uid)
        began = self.version
        gate = self.gates.get(prompt.uid)
        if gate is not None:
            await gate.wait()
        await asyncio.sleep(0)
        if prompt.uid in self.rejects:
            raise RolloutRejected("empty_response", f"prompt {prompt.uid}")
        if prompt.uid in self.breaks:
            raise self.breaks[prompt.uid]
        spans = (VersionSpan(began, 0, 4),)
        if self.version != began:
            spans = (VersionSpan(began, 0, 1), VersionSpan(self.version, 1, 4))
        clock = asyncio.get_running_loop().time
        return make_rollout(prompt, spans, clock() - 2.0, clock())

    async def score(self, rollout: AnyRollout) -> Sample:
        rollout = rollout_here(rollout)
        return Sample(rollout, np.full(rollout.draws.num_ids, -0.7, np.float32), reward=0.5)

    # what SiteWeights asks

    def choose(self, mirror: Mirror, name: str) -> None:
        assert (mirror.path / name / "manifest").exists(), "half a version is never served"
        self._chosen = name

    async def open(self) -> None:
        self.is_open = True

    async def sync(self, version: int) -> Any:
        assert self.is_open
        await asyncio.sleep(0)
        self.version = version
        self.taken.append(self._chosen)

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        await asyncio.Event().wait()


class Rollouts:
    """Counts how often rollouts were held back; controller.in_flight.Rollouts."""

    def __init__(self) -> None:
        self.holds = 0

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        self.holds += 1
        yield


class SiteWorld:
    """A site with its ends; use inside a running event loop."""

    def __init__(
        self,
        directory: Path,
        slots: int = 2,
        link: SiteLink | None = None,
        timeouts: LearnerTimeouts = LONG,
    ) -> None:
        self.link, self.servers, self.rollouts = FakeLink(), Servers(), Rollouts()
        used: SiteLink = self.link if link is None else link
        self.said: list[str] = []
        self.weights = SiteWeights(
            directory,
            "here",
            self.servers,
            self.servers,
            self.rollouts,
            used,
            Delays(),
            self.said.append,
        )
        self.outbox = SiteOutbox(used, self.weights)
        self.sampling = SiteSampling(
            self.servers,
            self.servers,
            slots=slots,
            score_slots=4,
            vocab_sizes={"teacher": 16},
            num_draws=1,
            weights=self.weights,
            outbox=self.outbox,
        )
        parts = self.sampling, self.weights, self.outbox
        self.site = Site(used, HELLO, *parts, timeouts, self.said.append)

    def serve(self) -> asyncio.Task[str | None]:
        return asyncio.create_task(self.site.serve())

    def welcome(self, run: str = "r1", wanted: Sequence[int] = ()) -> None:
        self.link.starts()
        self.link.tell(SiteWelcome(run, 10, list(wanted)))

    def offers(self, written: Written, *offers: Offer) -> None:
        """Offer versions, newest first, and answer what is asked for."""

        def answer(message: ToLearner) -> None:
            if isinstance(message, Want):
                data = written.read(message.name, message.file)[message.start : message.stop]
                self.link.tell(FilePiece(message.name, message.file, message.start), data)

        self.link.answer = answer
        for offer in offers:
            self.link.tell(offer)


async def until(happened: Callable[[], Any], *tasks: asyncio.Task[Any]) -> None:
    """Wait until it is so; a task that ends before raises what it ended with."""
    while not happened():
        for task in tasks:
            if task.done():
                task.result()
                raise AssertionError("it ended before")
        await asyncio.sleep(0.001)
