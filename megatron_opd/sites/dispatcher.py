"""Sends prompts to sites and takes their samples; what the controller sees of all sites.

Every prompt that is asked for is with a site, or waits for one, until the first answer to it; an
answer after that changes nothing but a count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Protocol

from megatron_opd.buffer.rejection import RolloutRejected, SampleRejected, SamplesLost, TooOld
from megatron_opd.controller.ports import TeacherScorer
from megatron_opd.records.drops import TOO_LATE
from megatron_opd.records.turn_faults import MOST_S
from megatron_opd.records.types import (
    AnyRollout,
    AnySample,
    Prompt,
    Rollout,
    Sample,
    rollout_here,
)
from megatron_opd.sites.checking import Forged, SampleRules, received_sample
from megatron_opd.sites.member import SiteMember
from megatron_opd.sites.messages import DETAIL_CHARS, Forget, Gone, SiteDone, SiteTask, ToSite
from megatron_opd.sites.pending import Assignment, PendingPrompts
from megatron_opd.sites.settings import DispatchSettings
from megatron_opd.transport.samples import Frames
from megatron_opd.wire.link.counts import LinkCounts
from sglang_bridge.arrays import pack
from sglang_bridge.errors import one_line

REASON_CHARS = 64


class TooLate(TooOld):
    """Reports a sample that took longer to come than sites.max_delay_s."""

    remedy = "raise sites.max_delay_s, or let samples travel faster"

    def __init__(self, detail: str) -> None:
        super().__init__(TOO_LATE, detail)


class SiteTalk(Protocol):
    """Names the methods of hub.Hub that the dispatcher needs."""

    def tell(self, member: SiteMember, message: ToSite) -> None:
        """Send a record to a site, after all that were to be sent before."""
        ...

    def link_counts(self, member: SiteMember) -> LinkCounts:
        """Return how the link to a site does."""
        ...

    def sample_counted(self, member: SiteMember, sample: Sample) -> None:
        """Note a sample that counts."""
        ...

    def fault(self, member: SiteMember, why: str) -> None:
        """Note that a site sent what no sound site sends."""
        ...


class Dispatcher:
    """Implements controller.ports.RolloutEngine and TeacherScorer.

    Args:
        settings: how samples are taken.
        rules: what a sample can hold.
        hub: talks to the sites.
        scorer: scores what sites without teachers sampled; None where every site has its own.

    newest: version that was offered last.
    """

    def __init__(
        self,
        settings: DispatchSettings,
        rules: SampleRules,
        hub: SiteTalk,
        scorer: TeacherScorer | None,
    ) -> None:
        self._settings, self._rules = settings, rules
        self._hub, self._scorer = hub, scorer
        self._resumed, self._highest = set(settings.resumed), settings.next_uid - 1
        self._members: dict[str, SiteMember] = {}
        self._pending = PendingPrompts(settings.group_size)
        self._answers: dict[int, asyncio.Future[Rollout]] = {}
        # answers of sites that were quicker than the controller of a resumed run, by prompt
        self._early: dict[int, Callable[[], None]] = {}
        self._scored: dict[int, Sample] = {}
        self.newest = settings.version

    # ------------------------------------------------------------ the controller's side

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Return what a site sampled for a prompt, once it is here. RolloutRejected, TooLate."""
        uid = prompt.uid
        answer = self._answers[uid] = asyncio.get_running_loop().create_future()
        self._resumed.discard(uid)
        self._highest = max(self._highest, uid)
        self._send(self._pending.ask(prompt))
        early = self._early.pop(uid, None)
        if early is not None:
            early()
        try:
            return await answer
        finally:
            if self._answers.pop(uid, None) is answer and uid in self._pending:
                self._remove(uid)  # nobody waits for it any more

    async def score(self, rollout: AnyRollout) -> AnySample:
        """Return the sample that came with a rollout, or let our own teachers score it.

        ScoreRejected. SamplesLost: its scores were lost with an earlier controller.
        """
        sample = self._scored.pop(rollout.prompt.uid, None)
        if sample is not None and sample.rollout is rollout:
            return sample
        site = rollout_here(rollout).engine
        if self._scorer is None or self._settings.scores.get(site, False):
            raise SamplesLost(f"the scores of prompt {rollout.prompt.uid} were not kept")
        return await self._scorer.score(rollout)

    # ------------------------------------------------------------ sites that come and go

    def wanted(self, holds: Collection[int]) -> list[int]:
        """Return which of these prompts, that a site has, are still to do."""
        return [uid for uid in dict.fromkeys(holds) if self._is_wanted(uid)]

    def _is_wanted(self, uid: int) -> bool:
        to_come = uid in self._resumed or uid > self._highest
        return uid in self._pending or (to_come and uid not in self._early)

    def join(self, member: SiteMember, holds: Collection[int]) -> None:
        """Give a site prompts. holds: what it has of what is wanted."""
        self._members[member.name] = member
        self._send(self._pending.join(member.name, member.slots, holds))

    def pause(self, member: SiteMember) -> None:
        """Give a site nothing more for now."""
        self._pending.pause(member.name)

    def resume(self, member: SiteMember) -> None:
        """Give a site prompts again, unless its weights are too old for any of them."""
        if not self._is_behind(member):
            self._send(self._pending.resume(member.name))

    def lose(self, member: SiteMember, *, for_good: bool) -> int:
        """Give a site's prompts to others; returns how many it had. See PendingPrompts.lose."""
        held = self._pending.count(member.name)
        self._send(self._pending.lose(member.name, for_good=for_good))
        return held

    def offered(self, version: int) -> None:
        """Note that a version was made: sites too far behind it get no prompt for now."""
        self.newest = max(version, self.newest)
        for member in self._members.values():
            if self._is_behind(member):
                self.pause(member)

    @property
    def wants_samples(self) -> bool:
        """Returns whether any prompt is asked for and not answered."""
        return bool(self._answers)

    def status_of(self, member: SiteMember) -> str:
        """Return in a few words whether a site is connected and up to date."""
        if member.state != "connected" or not self._is_behind(member):
            return f"{member.name} is {member.state}"
        behind = self.newest - max(member.served)
        return (
            f"{member.name} has weights that are {behind} versions behind, gets no prompts above "
            f"{self._settings.bound}"
        )

    def _is_behind(self, member: SiteMember) -> bool:
        """Return whether whatever a site begins now will be too old to be trained on.

        A site that serves nothing yet begins with the newest version.
        """
        served = max(member.served, default=self.newest)
        return self.newest - served > self._settings.bound

    # ------------------------------------------------------------ answers

    def gone(self, member: SiteMember, gone: Gone) -> None:
        """Take note that a prompt has no sample."""
        if not self._counts(member, gone.uid, partial(self.gone, member, gone)):
            return
        reason = one_line(gone.reason, REASON_CHARS) or "gone"
        member.figures.gone[reason] += 1
        detail = f"site {member.name}: {one_line(gone.detail, DETAIL_CHARS)}"
        self._answer(member, gone.uid, RolloutRejected(reason, detail))

    def done(self, member: SiteMember, done: SiteDone, frames: Frames) -> None:
        """Take a sample, in time."""
        held_s = member.next_delay_s()
        taken = partial(self._take, member, member.process, done, frames)
        if held_s > 0:
            asyncio.get_running_loop().call_later(held_s, taken)
        else:
            taken()

    def _take(self, member: SiteMember, process: int, done: SiteDone, frames: Frames) -> None:
        uid, limit_s = done.uid, self._settings.max_delay_s
        again = partial(self._take, member, process, done, frames)
        if process != member.process or not self._counts(member, uid, again):
            return
        try:
            delay_s = self._delay_s(member, done)
            sample = received_sample(
                self._rules,
                self._pending.prompt(uid),
                done,
                frames,
                may_have=partial(member.may_have_sampled, uid),
                scores=self._settings.scores[member.name],
                site=member.name,
                delay_s=delay_s,
            )
        except Forged as error:
            self._forget(member, uid)
            self._send(self._pending.take_from(member.name, uid))
            self._hub.fault(member, str(error))
            return
        if delay_s > limit_s:
            member.figures.too_late += 1
            why = f"site {member.name}: {delay_s:.1f} s, sites.max_delay_s is {limit_s:g}"
            self._answer(member, uid, TooLate(why))
            return
        rollout = sample.rollout
        behind = self.newest - rollout.oldest_version
        member.figures.add_sample(rollout.num_response_tokens, behind, delay_s)
        if self._settings.scores[member.name]:
            self._scored[uid] = sample
        self._answer(member, uid, rollout)
        self._hub.sample_counted(member, sample)

    def _delay_s(self, member: SiteMember, done: SiteDone) -> float:
        """Return the seconds from the end of sampling until now. Forged: times that cannot be."""
        offset_s = self._hub.link_counts(member).clock_offset_s or 0.0
        link_s = max(0.0, time.time() + offset_s - done.sent_s)
        if not (done.age_s >= 0 and done.duration_s >= 0 and link_s + done.age_s <= MOST_S):
            raise Forged(f"times of {done.age_s}, {done.duration_s} and {done.sent_s} s")
        return done.age_s + link_s

    def _counts(self, member: SiteMember, uid: int, later: Callable[[], None]) -> bool:
        """Return whether an answer is the first to a prompt that the site was given.

        later: is called once the controller asks for the prompt, if it has not yet.
        """
        if not self._pending.has(member.name, uid) or uid in self._early:
            member.figures.duplicates += 1
            return False
        if uid not in self._pending:
            self._early[uid] = later
            return False
        return True

    def _answer(self, member: SiteMember, uid: int, result: Rollout | SampleRejected) -> None:
        answer = self._answers[uid]
        self._remove(uid, answered_by=member)
        member.answered(uid)
        if answer.done():  # whoever waited was cancelled in this turn of the event loop
            self._scored.pop(uid, None)
        elif isinstance(result, SampleRejected):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _remove(self, uid: int, answered_by: SiteMember | None = None) -> None:
        """Remove a prompt, and let all sites forget it but the one that answered it."""
        for site in self._pending.remove(uid):
            if answered_by is None or site != answered_by.name:
                self._forget(self._members[site], uid)
        self._send(self._pending.fill())

    def _forget(self, member: SiteMember, uid: int) -> None:
        member.forgot(uid)
        self._hub.tell(member, Forget([uid]))

    def _send(self, assignments: Iterable[Assignment]) -> None:
        for assignment in assignments:
            member = self._members[assignment.site]
            if member.keeps(assignment.prompt.uid):  # or it would take it for one that it has
                self._forget(member, assignment.prompt.uid)
            plays, scores = self._rules.plays is not None, self._settings.scores[member.name]
            self._hub.tell(member, task_of(assignment.prompt, plays=plays, scores=scores))


def task_of(prompt: Prompt, *, plays: bool = False, scores: bool = True) -> SiteTask:
    """Return what asks a site for a sample of a prompt.

    plays: with an environment. scores: whether the site's own teachers score it.
    """
    own_Q = prompt.teacher_ids_Q
    return SiteTask(
        uid=prompt.uid,
        text=prompt.text,
        ids=pack(prompt.token_ids_P),
        answer=prompt.answer,
        teacher=prompt.teacher,
        teacher_ids=pack(own_Q) if scores and own_Q is not None else None,
        mixture=prompt.mixture,
        max_new_tokens=prompt.max_new_tokens,
        stop=prompt.stop,
        task=prompt.task,
        row_id=prompt.row_id,
        row=prompt.row,
        reward_weight=prompt.reward_weight,
        teacher_weight=prompt.teacher_weight,
        messages=prompt.messages if plays else (),
        tools=prompt.tools if plays else (),
        columns=prompt.columns if plays else {},
    )
