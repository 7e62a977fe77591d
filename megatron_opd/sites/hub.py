"""Keeps the sampler sites of a run: who comes and goes, who is refused, lost or quarantined.

Whatever a site sends is taken, or counted as refused and why; a site whose samples are refused too
often is quarantined: nothing more of it is taken.

| what happens | what follows                                                                  |
|--------------|-------------------------------------------------------------------------------|
| Restarted    | its process is new: it says Hello, and what it holds                          |
| Hello        | Welcome, the versions there are, then prompts; or Farewell, and why           |
| Broken       | it gets no more prompts; after lost_after_s others get those that it has, too |
| Mended       | it gets prompts again; what it answered meanwhile counts                      |
| Leaving      | others get its prompts at once                                                |
| start_over   | the run goes on from a checkpoint: Again; all before the next Hello is void   |
| quarantine   | Farewell, and why; others get its prompts at once                             |
| farewell     | Farewell, also to who says Hello from then on                                 |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_opd.buffer.delays import DelayStream
from megatron_opd.controller.ports import TeacherScorer
from megatron_opd.records.types import Sample, rollout_here
from megatron_opd.sites.checking import SampleRules
from megatron_opd.sites.dispatcher import Dispatcher
from megatron_opd.sites.figures import SiteFigures, SitesNow, columns
from megatron_opd.sites.handshake import ExpectedSite, refusal
from megatron_opd.sites.logp_comparison import LogpComparison
from megatron_opd.sites.member import SiteMember
from megatron_opd.sites.messages import (
    DETAIL_CHARS,
    Again,
    Farewell,
    FilePiece,
    Gone,
    Leaving,
    Offer,
    Serving,
    SiteDone,
    SiteHello,
    SiteWelcome,
    ToLearner,
    ToSite,
    Want,
    decode_to_learner,
    encode,
)
from megatron_opd.sites.ports import SiteLinks
from megatron_opd.sites.settings import DispatchSettings, HubSettings
from megatron_opd.sites.tasks import FirstFailure
from megatron_opd.sites.version_server import VersionServer
from megatron_opd.transport.samples import Frames
from megatron_opd.weight_sync.loops import run_until_first_ends
from megatron_opd.wire.codec import BadMessage
from megatron_opd.wire.link.counts import LinkCounts
from megatron_opd.wire.link.events import Broken, Mended, Received, Restarted
from megatron_opd.wire.link.wire import BULK, URGENT
from sglang_bridge.errors import one_line

logger = logging.getLogger(__name__)

STALL_REMEDY = (
    "start sites that are away; where weights are too far behind, raise sites.max_staleness (with "
    "permits schedule.max_staleness) or let them travel faster"
)


class NoSiteLeft(RuntimeError):
    """Reports that every site is quarantined."""


class Hub:
    """Talks to all sites; `dispatcher` is what the controller sees of them.

    Args:
        settings: how sites are treated.
        dispatch: which prompts they are sent, and which samples are taken.
        expected: what they must have like the learner's site.
        rules: what a sample can hold.
        links: to the sites.
        delays: of each site's samples, for studies.
        scorer: see Dispatcher.
        say: tells the user.

    versions: offers weights to the sites.
    """

    def __init__(
        self,
        settings: HubSettings,
        dispatch: DispatchSettings,
        expected: ExpectedSite,
        rules: SampleRules,
        links: SiteLinks,
        delays: Mapping[str, DelayStream],
        scorer: TeacherScorer | None,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._scores, self._expected = settings, dispatch.scores, expected
        self._links, self._rules, self._say = links, rules, say
        self._group_size, self._max_delay_s = dispatch.group_size, dispatch.max_delay_s
        self._failure = FirstFailure()
        self._members = {
            name: SiteMember(name, delays[name], self._failure) for name in settings.slots
        }
        self.dispatcher = Dispatcher(dispatch, rules, self, scorer)
        self.versions = VersionServer(self)
        self._logp = LogpComparison()
        self._joined, self._answered = asyncio.Event(), asyncio.Event()
        self._has_ended = False

    async def first_site(self) -> None:
        """Return once a site is part of the run."""
        await self._joined.wait()

    @property
    def had_sites(self) -> bool:
        """Returns whether a site is part of the run, or was."""
        return self._joined.is_set()

    def start_over(
        self, settings: HubSettings, dispatch: DispatchSettings, scorer: TeacherScorer | None
    ) -> None:
        """Continue from a checkpoint as another start of the run does, with a new `dispatcher`.

        Call after the weight sync has started over. Whoever waits at the dispatcher that there was
        waits for ever.
        """
        self._settings = settings
        self.dispatcher = Dispatcher(dispatch, self._rules, self, scorer)
        self._logp = LogpComparison()  # version numbers come again, with other weights
        for member in self._members.values():
            if member.is_welcome:
                member.start_over()
                self.tell(member, Again())

    # ------------------------------------------------------------ figures

    @property
    def figures(self) -> dict[str, SiteFigures]:
        """Returns the counts of each site."""
        return {name: member.figures for name, member in self._members.items()}

    def columns(self) -> dict[str, Any]:
        """Return the columns of a row of metrics.jsonl."""
        states = [member.state for member in self._members.values()]
        now = SitesNow(states.count("connected"), states.count("quarantined"))
        return columns(self.figures, now)

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of each site."""
        return {
            name: member.figures.as_json(
                member.state, self.link_counts(member), self.versions.num_bytes[name]
            )
            for name, member in self._members.items()
        }

    # ------------------------------------------------------------ talking

    async def serve(self) -> None:
        """Do what sites ask for until cancelled. Raises what ends the links, NoSiteLeft."""
        try:
            await run_until_first_ends(self._listen(), self._failure.wait(), self._warn_of_stalls())
        finally:
            for member in self._members.values():
                member.end()

    async def send(self, site: str, message: ToSite, frames: Sequence[bytes] = ()) -> None:
        """Send a record to a site; waits while its link is full. Notes what it is offered."""
        if isinstance(message, Offer):
            self._members[site].offered.add(message.version)
            self.dispatcher.offered(message.version)
        lane = BULK if isinstance(message, FilePiece) else URGENT
        await self._links.send(site, [encode(message), *frames], lane)

    async def farewell(self) -> None:
        """Tell every site of the run that it has ended as it should; call before `serve` ends."""
        self._has_ended = True
        for name, member in self._members.items():
            if member.is_welcome or member.awaits_hello:
                member.farewell_sent = True
                await self._links.send(name, [encode(Farewell(None))], URGENT)

    @property
    def awaiting_farewell(self) -> list[str]:
        """Returns the sites that were part of the run and have not received its farewell."""
        return [name for name, member in self._members.items() if self._awaits_farewell(member)]

    def _awaits_farewell(self, member: SiteMember) -> bool:
        if member.quarantined is not None or member.last_refusal is not None or member.has_left:
            return False
        if not member.figures.starts:
            return False
        return not member.farewell_sent or self.link_counts(member).waiting_bytes > 0

    def tell(self, member: SiteMember, message: ToSite) -> None:
        """Send a record to a site, after all that were to be sent before."""
        member.enqueue(partial(self.send, member.name, message))

    def link_counts(self, member: SiteMember) -> LinkCounts:
        """Return how the link to a site does."""
        return self._links.counts(member.name)

    async def _warn_of_stalls(self) -> None:
        """Tell the user, once for each stall, that no answer came for max_delay_s; never ends."""
        while True:
            self._answered.clear()
            try:
                async with asyncio.timeout(self._max_delay_s):
                    await self._answered.wait()
            except TimeoutError:
                if self.dispatcher.wants_samples:
                    states = map(self.dispatcher.status_of, self._members.values())
                    self._say(
                        f"no site has sent a sample for {self._max_delay_s:g} s "
                        f"(sites.max_delay_s): {', '.join(states)}; {STALL_REMEDY}"
                    )
                    await self._answered.wait()

    async def _listen(self) -> None:
        while True:
            event = await self._links.next()
            member = self._members[event.peer]
            match event:
                case Received():
                    self._received(member, event)
                case Restarted():
                    self._restarted(member)
                case Broken():
                    member.is_broken = True
                    self._later_lost(member)
                case Mended():
                    member.is_broken = False
                    if member.is_welcome:
                        member.stop_timer()
                        self.dispatcher.resume(member)

    def _received(self, member: SiteMember, received: Received) -> None:
        try:
            message = decode_to_learner(received.parts[0])
            self._do(member, message, received.parts[1:])
        except BadMessage as error:
            self.fault(member, one_line(str(error)))
        except ValueError as error:
            member.figures.refused[type(error).__name__] += 1
            logger.warning("site %s: %s", member.name, one_line(str(error)))

    def _do(self, member: SiteMember, message: ToLearner, frames: Frames) -> None:
        """Do what a record says. ValueError: it makes no sense now."""
        if member.quarantined is not None:
            if isinstance(message, SiteHello):
                self._refuse(member, member.quarantined)
            return
        if isinstance(message, SiteHello):
            if self._has_ended:
                member.farewell_sent = True
                self.tell(member, Farewell(None))
            else:
                self._greet(member, message)
        elif member.awaits_hello:  # of the run before, which is no more
            member.figures.void += isinstance(message, SiteDone | Gone)
        elif not member.is_welcome:
            raise ValueError(f"{type(message).__name__} before Welcome")
        elif isinstance(message, Leaving):
            self._say(f"site {member.name} leaves")
            self._without(member)
            member.has_left = True
        elif isinstance(message, Serving):
            self._serving(member, message.version)
        elif isinstance(message, Want):
            self.versions.wants(member.name, message)
        else:
            self._answered.set()
            if isinstance(message, Gone):
                self.dispatcher.gone(member, message)
            else:
                self.dispatcher.done(member, message, frames)

    # ------------------------------------------------------------ coming and going

    def _greet(self, member: SiteMember, hello: SiteHello) -> None:
        """Welcome a site, or refuse it."""
        offset_s = self.link_counts(member).clock_offset_s
        skew_s = hello.clock_s - time.time() if offset_s is None else offset_s
        cause = refusal(hello, member.name, self._scores[member.name], self._expected, skew_s)
        member.end()
        if cause is not None:
            self.dispatcher.lose(member, for_good=True)
            self._refuse(member, cause)
            return
        self.dispatcher.pause(member)
        slots = min(hello.slots, self._settings.slots[member.name])
        wanted = self.dispatcher.wanted(hello.holds)[:slots]
        member.begin(hello.process, slots, wanted, self.dispatcher.newest)
        self.tell(member, SiteWelcome(self._settings.run, self._settings.updates, wanted))
        member.enqueue(partial(self._join, member, wanted))
        before = f", {len(wanted)} of them from before" if wanted else ""
        self._say(f"site {member.name} is there with {slots} slots{before}")

    async def _join(self, member: SiteMember, holds: Sequence[int]) -> None:
        """Give a site its first prompts, once it was told which versions there are."""
        await self.versions.joined(member.name)
        if not member.offered:
            member.serves(0)  # what its servers loaded
        self.dispatcher.join(member, holds)
        self._joined.set()

    def _refuse(self, member: SiteMember, cause: str) -> None:
        """Tell a site why it is not part of the run, and the user once."""
        cause = one_line(cause, DETAIL_CHARS)
        member.figures.refused["Hello"] += 1
        self.tell(member, Farewell(cause))
        if cause != member.last_refusal:
            member.last_refusal = cause
            self._say(cause)

    def _restarted(self, member: SiteMember) -> None:
        """Wait for the Hello of a new process; what was in flight to the old one is gone."""
        member.end()
        self._later_lost(member)

    def _later_lost(self, member: SiteMember) -> None:
        self.dispatcher.pause(member)
        member.start_timer(self._settings.lost_after_s, partial(self._lost, member))

    def _lost(self, member: SiteMember) -> None:
        """Give a site's prompts to others; whichever answer comes first counts."""
        held = self.dispatcher.lose(member, for_good=False)
        if held:
            member.figures.lost += 1
            self._say(f"site {member.name} is lost with {held} prompts, which others sample")

    def _without(self, member: SiteMember) -> None:
        """Do without a process of a site; others get its prompts at once."""
        member.end()
        self.dispatcher.lose(member, for_good=True)
        member.enqueue(partial(self.versions.left, member.name))

    # ------------------------------------------------------------ faults

    def _serving(self, member: SiteMember, version: int) -> None:
        if version not in member.offered:
            self.fault(member, f"it serves version {version}, which it was not offered")
            return
        member.serves(version)
        self.dispatcher.resume(member)

    def sample_counted(self, member: SiteMember, sample: Sample) -> None:
        """Compare a sample that counts with those of the other sites."""
        rollout = rollout_here(sample.rollout)
        if rollout.prompt.uid % self._group_size or len(rollout.spans) > 1:
            return
        self._logp.add(member.name, rollout.oldest_version, *rollout.geometric_logps)
        why = self._logp.fault_of(member.name)
        if why is not None:
            self._quarantine(member, why)

    def fault(self, member: SiteMember, why: str) -> None:
        """Count what no sound site sends."""
        member.figures.faults += 1
        logger.warning("site %s: %s", member.name, why)
        if member.figures.faults >= self._settings.quarantine_after:
            self._quarantine(member, why)

    def _quarantine(self, member: SiteMember, why: str) -> None:
        if member.quarantined is not None:
            return
        member.quarantined = one_line(f"site {member.name} is quarantined: {why}", DETAIL_CHARS)
        self._say(member.quarantined)
        self._logp.forget(member.name)
        self._without(member)
        self.tell(member, Farewell(member.quarantined))
        if all(each.quarantined is not None for each in self._members.values()):
            self._failure.put(NoSiteLeft(f"no site is left: {member.quarantined}"))
