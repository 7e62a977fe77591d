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

from megatron_opd.controller.ports import TeacherScorer
from megatron_opd.records.types import Sample, rollout_here
from megatron_opd.sites.checking import SampleRules
from megatron_opd.sites.figures import SiteFigures, SitesNow, columns
from megatron_opd.sites.greeting import refusal
from megatron_opd.sites.intake import Hold, Intake, SiteEnds
from megatron_opd.sites.member import Errand, SiteMember
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
from megatron_opd.sites.ports import SiteLinks, Versions
from megatron_opd.sites.settings import ExpectedSite, HubSettings, IntakeSettings
from megatron_opd.sites.silence import Silence
from megatron_opd.sites.suspicion import Suspicions
from megatron_opd.sites.together import Failure, together
from megatron_opd.transport.samples import Frames
from megatron_opd.wire.codec import BadMessage
from megatron_opd.wire.link.events import Broken, Mended, Received, Restarted
from megatron_opd.wire.link.wire import BULK, URGENT
from sglang_bridge.errors import one_line

logger = logging.getLogger(__name__)


class NoSiteLeft(RuntimeError):
    """Reports that every site is quarantined."""


class Hub:
    """Talks to all sites; `intake` is what the controller sees of them.

    Args:
        settings: how sites are treated.
        taking: how their samples are taken.
        expected: what they must have like the learner's site.
        rules: what a sample can hold.
        links: to the sites.
        scorer, hold: see Intake.
        say: tells the user.

    versions: offers weights; set before `serve`.
    """

    def __init__(
        self,
        settings: HubSettings,
        taking: IntakeSettings,
        expected: ExpectedSite,
        rules: SampleRules,
        links: SiteLinks,
        scorer: TeacherScorer | None,
        say: Callable[[str], None],
        hold: Hold | None = None,
    ) -> None:
        self._settings, self._scores, self._expected = settings, taking.scores, expected
        self._links, self._say = links, say
        self._group_size = taking.group_size
        self._members = {name: SiteMember(name) for name in settings.slots}
        self._rules, self._hold = rules, hold
        self.intake = self._intake(taking, scorer)
        self._silence = Silence(
            taking.max_delay_s,
            lambda: self.intake.wants_samples,
            lambda: map(self.intake.standing, self._members.values()),
            say,
        )
        self.versions: Versions | None = None
        self._suspicions = Suspicions()
        self._came = asyncio.Event()
        self._failure = Failure()
        self._has_ended = False

    async def first(self) -> None:
        """Return once a site is part of the run."""
        await self._came.wait()

    @property
    def had_sites(self) -> bool:
        """Returns whether a site is part of the run, or was."""
        return self._came.is_set()

    def start_over(
        self, settings: HubSettings, taking: IntakeSettings, scorer: TeacherScorer | None
    ) -> None:
        """Continue from a checkpoint as another start of the run does, with a new `intake`.

        Call after `versions` has started over. Whoever waits at the intake before waits for ever.
        """
        self._settings = settings
        self.intake = self._intake(taking, scorer)
        self._suspicions = Suspicions()  # version numbers come again, with other weights
        for member in self._members.values():
            if member.is_welcome:
                member.start_over()
                self._tell(member, Again())

    def _intake(self, taking: IntakeSettings, scorer: TeacherScorer | None) -> Intake:
        ends = SiteEnds(self._tell, self._links.counts, self._took, self._fault)
        return Intake(taking, self._rules, ends, scorer, self._hold)

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

    def summary(self, weight_bytes: Mapping[str, int]) -> dict[str, Any]:
        """Return what summary.json says of each site. weight_bytes: sent, by site."""
        return {
            name: member.figures.as_json(
                member.state, self._links.counts(name), weight_bytes.get(name, 0)
            )
            for name, member in self._members.items()
        }

    # ------------------------------------------------------------ talking

    async def serve(self) -> None:
        """Do what sites ask for until cancelled. Raises what ends the links, NoSiteLeft."""
        try:
            await together(self._listen(), self._failure.wait(), self._silence.watch())
        finally:
            for member in self._members.values():
                member.end()

    async def send(self, site: str, message: ToSite, frames: Sequence[bytes] = ()) -> None:
        """Send a record to a site; waits while its link is full. Notes what it is offered."""
        if isinstance(message, Offer):
            self._members[site].offered.add(message.version)
            self.intake.offered(message.version)
        lane = BULK if isinstance(message, FilePiece) else URGENT
        await self._links.send(site, [encode(message), *frames], lane)

    async def farewell(self) -> None:
        """Tell every site of the run that it has ended as it should; call before `serve` ends."""
        self._has_ended = True
        for name, member in self._members.items():
            if member.is_welcome or member.is_asked_again:
                member.is_told = True
                await self._links.send(name, [encode(Farewell(None))], URGENT)

    @property
    def unaware(self) -> list[str]:
        """Returns the sites that were part of the run and have not heard its farewell."""
        return [name for name, member in self._members.items() if self._is_unaware(member)]

    def _is_unaware(self, member: SiteMember) -> bool:
        if member.quarantined is not None or member.last_refusal is not None or member.has_left:
            return False
        if not member.figures.starts:
            return False
        return not member.is_told or self._links.counts(member.name).waiting_bytes > 0

    def _tell(self, member: SiteMember, message: ToSite) -> None:
        self._do_for(member, partial(self.send, member.name, message))

    def _do_for(self, member: SiteMember, errand: Errand) -> None:
        member.do(errand, self._failure.watch)

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
                        self.intake.resume(member)

    def _received(self, member: SiteMember, received: Received) -> None:
        try:
            message = decode_to_learner(received.parts[0])
            self._do(member, message, received.parts[1:])
        except BadMessage as error:
            self._fault(member, one_line(str(error)))
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
                member.is_told = True
                self._tell(member, Farewell(None))
            else:
                self._greet(member, message)
        elif member.is_asked_again:  # of the run before, which is no more
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
            assert self.versions is not None
            self.versions.wants(member.name, message)
        else:
            self._silence.broken()
            self._answered(member, message, frames)

    def _answered(self, member: SiteMember, message: Gone | SiteDone, frames: Frames) -> None:
        if isinstance(message, Gone):
            self.intake.gone(member, message)
        else:
            self.intake.done(member, message, frames)

    # ------------------------------------------------------------ coming and going

    def _greet(self, member: SiteMember, hello: SiteHello) -> None:
        """Welcome a site, or refuse it."""
        offset_s = self._links.counts(member.name).clock_offset_s
        skew_s = hello.clock_s - time.time() if offset_s is None else offset_s
        cause = refusal(hello, member.name, self._scores[member.name], self._expected, skew_s)
        member.end()
        if cause is not None:
            self.intake.lose(member, for_good=True)
            self._refuse(member, cause)
            return
        self.intake.pause(member)
        slots = min(hello.slots, self._settings.slots[member.name])
        wanted = self.intake.wanted(hello.holds)[:slots]
        member.begin(hello.process, slots, wanted, self.intake.newest)
        self._tell(member, SiteWelcome(self._settings.run, self._settings.updates, wanted))
        self._do_for(member, partial(self._joined, member, wanted))
        before = f", {len(wanted)} of them from before" if wanted else ""
        self._say(f"site {member.name} is there with {slots} slots{before}")

    async def _joined(self, member: SiteMember, holds: Sequence[int]) -> None:
        """Give a site its first prompts, once it was told which versions there are."""
        assert self.versions is not None
        await self.versions.joined(member.name)
        if not member.offered:
            member.serves(0)  # what its servers loaded
        self.intake.join(member, holds)
        self._came.set()

    def _refuse(self, member: SiteMember, cause: str) -> None:
        """Tell a site why it is not part of the run, and the user once."""
        cause = one_line(cause, DETAIL_CHARS)
        member.figures.refused["Hello"] += 1
        self._tell(member, Farewell(cause))
        if cause != member.last_refusal:
            member.last_refusal = cause
            self._say(cause)

    def _restarted(self, member: SiteMember) -> None:
        """Wait for the Hello of a new process; what was in flight to the old one is gone."""
        member.end()
        self._later_lost(member)

    def _later_lost(self, member: SiteMember) -> None:
        self.intake.pause(member)
        member.start_timer(self._settings.lost_after_s, partial(self._lost, member))

    def _lost(self, member: SiteMember) -> None:
        """Give a site's prompts to others; whichever answer comes first counts."""
        held = self.intake.lose(member, for_good=False)
        if held:
            member.figures.lost += 1
            self._say(f"site {member.name} is lost with {held} prompts, which others sample")

    def _without(self, member: SiteMember) -> None:
        """Do without a process of a site; others get its prompts at once."""
        member.end()
        self.intake.lose(member, for_good=True)
        assert self.versions is not None
        self._do_for(member, partial(self.versions.left, member.name))

    # ------------------------------------------------------------ faults

    def _serving(self, member: SiteMember, version: int) -> None:
        if version not in member.offered:
            self._fault(member, f"it serves version {version}, which it was not offered")
            return
        member.serves(version)
        self.intake.resume(member)

    def _took(self, member: SiteMember, sample: Sample) -> None:
        """Compare a sample that counts with those of the other sites."""
        rollout = rollout_here(sample.rollout)
        if rollout.prompt.uid % self._group_size or len(rollout.spans) > 1:
            return
        self._suspicions.add(member.name, rollout.oldest_version, rollout.geometric_logp)
        why = self._suspicions.why(member.name)
        if why is not None:
            self._quarantine(member, why)

    def _fault(self, member: SiteMember, why: str) -> None:
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
        self._suspicions.forget(member.name)
        self._without(member)
        self._tell(member, Farewell(member.quarantined))
        if all(each.quarantined is not None for each in self._members.values()):
            self._failure.put(NoSiteLeft(f"no site is left: {member.quarantined}"))
