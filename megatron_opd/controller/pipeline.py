"""Knows where every admitted prompt is, and drops what is not trained on, with a counted reason.

Invariants: every admitted prompt is trained on, dropped, or in flight; it holds one permit until
then (buffer/permits.py); a drop takes the rest of its group along (buffer/groups.py), and a group
may be dropped for its rewards (buffer/spread.py). The loops that move them are controller.py's.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable, Sequence

import msgspec

from megatron_opd.buffer.batcher import BatchIncomplete
from megatron_opd.buffer.buffer import SampleBuffer
from megatron_opd.buffer.completion import NO_DEADLINE, CompletionBuffer
from megatron_opd.buffer.groups import GroupIncomplete, SampleGroups
from megatron_opd.buffer.permits import (
    Permits,
    TooStale,
    staleness_versions,
)
from megatron_opd.buffer.planned import PlannedBuffer
from megatron_opd.buffer.rejection import SampleRejected, SamplesLost, TooOld
from megatron_opd.buffer.spread import GroupVerdict, SpreadFilter
from megatron_opd.controller.errors import EverythingDropped
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import Schedule
from megatron_opd.controller.snapshot import ControllerState, Place, StartedTrajectory, place
from megatron_opd.metrics.types import Accounting, Depths
from megatron_opd.records.turns import SampledTurn
from megatron_opd.records.types import AnyRollout, AnySample, HeldRollout, HeldSample, Prompt

# fewer drops in a row than this never stop a run, however few permits it has
MIN_DROPS_IN_A_ROW = 16


class Pipeline(ABC):
    """Serves as the base of Controller: its prompts, without the loops.

    Its owner queues the prompts and rollouts of `state.line`, see `Controller._rejoin`.
    """

    def __init__(self, schedule: Schedule, ports: Ports, state: ControllerState) -> None:
        self._schedule, self._ports = schedule, ports
        holders = [member.uid for member in state.line]
        self._permits = Permits(schedule.permits, holders)
        self._buffer = _buffer(schedule, state.updates)
        self._groups = SampleGroups(
            schedule.group_size, state.broken_groups, state.scored_in_groups
        )
        self._moved = asyncio.Event()
        # admitted and not scored: the prompt, or the rollout that waits for its score
        self._unscored: dict[int, Prompt | AnyRollout] = {}
        self._num_scoring = 0
        self._dropped = Counter(state.dropped)
        self._dropped_in_a_row, self._too_old_in_a_row = state.dropped_in_a_row, 0
        self._num_admitted, self._num_consumed = state.admitted, state.consumed
        self._num_updates, self._version = state.updates, state.version
        self._next_uid = state.next_uid
        self._interrupted = False
        self._filter = _filter(schedule, state)
        # group -> its last sample, while what becomes of the group depends on others
        self._undecided: dict[int, AnySample] = {}
        self._counted: set[int] = set()
        """Sampled anew since their arrays were lost, after their scores had been counted."""

    @abstractmethod
    def _queue(self, uid: int) -> None:
        """Let a prompt be sampled once there is a slot."""

    # ------------------------------------------------------------ what there is

    @property
    def accounting(self) -> Accounting:
        """Returns where every admitted prompt is now."""
        done = self._num_consumed + self._dropped.total()
        return Accounting(
            updates=self._num_updates,
            version=self._version,
            admitted=self._num_admitted,
            consumed=self._num_consumed,
            dropped=dict(self._dropped),
            in_flight=self._num_admitted - done,
            interrupted=self._interrupted,
        )

    @property
    def next_uid(self) -> int:
        """Returns the first prompt that was not considered yet."""
        return self._next_uid

    async def snapshot(self) -> ControllerState:
        """Return what a later controller continues from; call only between two updates.

        It is the state at the time of the call, unless samples are being sampled anew: then it is
        that once they are there.
        """
        while True:
            while self._counted:
                await self._buffer.changed()
            places, state = self._places(), self._state()
            line = await asyncio.gather(*map(self._whole, places), return_exceptions=True)
            whole = [place(found) for found in line if not isinstance(found, BaseException)]
            if len(whole) == len(line):
                return msgspec.structs.replace(state, line=whole)
            for error in line:
                if isinstance(error, BaseException) and not isinstance(error, SamplesLost):
                    raise error
            lost = [p for p, f in zip(places, line, strict=True) if isinstance(f, SamplesLost)]
            while any(place is other for place in lost for other in self._places()):
                await self._buffer.changed()  # what is lost becomes a prompt again

    def _places(self) -> list[Prompt | AnyRollout | AnySample]:
        """Return how far the admitted prompts have come, in their order."""
        return [s or self._unscored[uid] for uid, s in self._buffer.in_line()]

    def _state(self) -> ControllerState:
        """Return the state, but for the line."""
        broken, scored = self._groups.state
        curriculum = self._ports.curriculum
        return ControllerState(
            updates=self._num_updates,
            version=self._version,
            admitted=self._num_admitted,
            consumed=self._num_consumed,
            dropped=dict(self._dropped),
            dropped_in_a_row=self._dropped_in_a_row,
            next_uid=self._next_uid,
            line=[],
            broken_groups=broken,
            scored_in_groups=scored,
            spread=None if self._filter is None else self._filter.state,
            curriculum=None if curriculum is None else curriculum.state,
            passed=self._ports.passed(),
        )

    def _whole(self, found: Prompt | AnyRollout | AnySample) -> Awaitable[Place]:
        """Ask for the arrays of what is held elsewhere, and for turns of what is under way."""
        if isinstance(found, HeldRollout | HeldSample):
            assert self._ports.store is not None
            return self._ports.store.whole(found)
        if isinstance(found, Prompt) and self._ports.turns is not None:
            return _begun(found, self._ports.turns.turns_of(found.uid))
        return _itself(found)

    def _depths(self) -> Depths:
        return Depths(
            rolling=self._buffer.waiting_for_score - self._num_scoring,
            scoring=self._num_scoring,
            buffered=self._buffer.scored,
            permits_in_use=self._permits.in_use,
            permits=self._permits.total,
        )

    # ------------------------------------------------------------ what is scored

    def _rolled_out(self, rollout: AnyRollout) -> None:
        self._unscored[rollout.prompt.uid] = rollout
        self._num_scoring += 1

    def _keep(self, sample: AnySample) -> None:
        self._accept(sample)
        self._put(sample)

    def _put(self, sample: AnySample) -> None:
        uid = sample.rollout.prompt.uid
        self._buffer.put(sample)
        del self._unscored[uid]
        if not self._holds(sample):  # lost while its group was not decided about
            self._reopen(uid)
        if self._is_too_old(sample):  # since then
            self._drop_old([uid])
        self._moved.set()

    def _accept(self, sample: AnySample) -> None:
        """Count a score; what becomes of the sample is decided."""
        self._num_scoring -= 1
        self._groups.complete(sample.rollout.prompt.uid)
        if self._ports.curriculum is not None:
            self._ports.curriculum.judged(sample)

    def _decide(self, verdicts: Iterable[GroupVerdict]) -> None:
        """Put the last samples of groups that are kept, and drop the groups that are not."""
        for verdict in verdicts:
            sample = self._undecided.pop(verdict.group)
            if verdict.reason is None:
                self._keep(sample)
            else:
                self._throw_away(sample, verdict.reason)

    def _holds(self, sample: AnySample) -> bool:
        return self._ports.store is None or self._ports.store.holds(sample)

    def _put_back(self, samples: Sequence[AnySample]) -> None:
        """Return a batch to the buffer, as some of it was lost before it was trained on."""
        self._buffer.put_back(samples)
        for sample in samples:
            if not self._holds(sample):
                self._reopen(sample.rollout.prompt.uid)

    def _reopen(self, uid: int) -> None:
        sample = self._buffer.reopen(uid)
        if sample is not None:
            self._counted.add(uid)
            self._sample_anew(sample.rollout.prompt)

    def _sample_anew(self, prompt: Prompt) -> None:
        self._unscored[prompt.uid] = prompt
        self._queue(prompt.uid)

    # ------------------------------------------------------------ what is too old

    def _is_too_old(self, sample: AnySample) -> bool:
        """Return whether no update may train on a sample that a site has sampled."""
        if self._schedule.sites is None:  # what servers sample is never too old
            return False
        return staleness_versions(sample, self._num_updates) > self._schedule.bound

    def _check_age(self, sample: AnySample) -> None:
        if self._is_too_old(sample):
            raise TooStale(sample.rollout.oldest_version, self._num_updates, self._schedule.bound)

    def _drop_old(self, uids: Iterable[int]) -> None:
        """Drop scored samples that got older than the bound while they waited, with their groups.

        Only sites' samples do: a site may sample with older weights than the live ones.
        """
        line = dict(self._buffer.in_line())
        for uid in uids:
            sample = line[uid]
            if sample is None or not self._buffer.withdraw([uid]):  # with another of its group
                continue
            version, bound = sample.rollout.oldest_version, self._schedule.bound
            self._forget(uid, TooStale(version, self._num_updates, bound))
            self._break_up(uid)
            self._buffer.open_again()

    def _drop_all_old(self) -> None:
        if self._schedule.sites is None:
            return
        line = self._buffer.in_line()
        self._drop_old([uid for uid, sample in line if sample and self._is_too_old(sample)])

    def _check_too_old(self, last: TooOld) -> None:
        """Raise EverythingDropped once nothing but what is too old comes."""
        count, most = self._too_old_in_a_row, self._schedule.most_too_old
        if count >= max(most, MIN_DROPS_IN_A_ROW):
            what = "samples" if self._schedule.group_size == 1 else "groups"
            raise EverythingDropped(
                f"{count} {what} in a row were dropped, the last for {last}; no other came: "
                f"{last.remedy}"
            )

    # ------------------------------------------------------------ what is dropped

    def _drop(self, uid: int, rejection: SampleRejected) -> None:
        self._counted.discard(uid)
        was_broken = self._groups.broken(uid)
        self._remove(uid, rejection)
        self._break_up(uid)
        self._moved.set()
        if isinstance(rejection, TooOld):
            self._too_old_in_a_row += not was_broken
            self._check_too_old(rejection)
            return
        # samples dropped with another one are not counted again
        self._dropped_in_a_row += not isinstance(rejection, GroupIncomplete)
        if self._dropped_in_a_row >= max(self._permits.total, MIN_DROPS_IN_A_ROW):
            raise EverythingDropped(
                f"{self._dropped_in_a_row} samples in a row were dropped, the last for {rejection}"
            )

    def _break_up(self, uid: int) -> None:
        """Drop the others of a group, one of which was dropped."""
        last = self._undecided.pop(uid // self._schedule.group_size, None)
        if last is not None:  # the prompt was being sampled anew, or got too old
            self._num_scoring -= 1
            self._remove(last.rollout.prompt.uid, GroupIncomplete(last.rollout.prompt.uid))
        for other in self._buffer.withdraw(self._groups.break_up(uid)):
            self._forget(other, GroupIncomplete(other))
        if self._filter is not None:
            self._decide(self._filter.broken(uid // self._schedule.group_size))

    def _throw_away(self, last: AnySample, reason: str) -> None:
        """Drop a group all of whose members are scored; none of them is in a batch."""
        uid, size = last.rollout.prompt.uid, self._schedule.group_size
        self._accept(last)
        self._buffer.drop(uid)
        del self._unscored[uid]
        first = uid // size * size
        others = self._buffer.withdraw(range(first, first + size))
        if self._counted.intersection(range(first, first + size)):
            self._groups.break_up(uid)  # members that are being sampled anew are dropped then
        for member in sorted([uid, *others]):
            self._forget(member, SampleRejected(reason, f"the group of prompt {first}"))
        self._moved.set()

    def _remove(self, uid: int, rejection: SampleRejected) -> None:
        self._buffer.drop(uid)
        del self._unscored[uid]
        self._forget(uid, rejection)

    def _leave_out(self, samples: Sequence[AnySample]) -> None:
        """Drop what is left of a batch when the prompts end: a learner needs equal shares."""
        for sample in samples:
            rejection = BatchIncomplete(len(samples), self._schedule.batch_size)
            self._forget(sample.rollout.prompt.uid, rejection)

    def _forget(self, uid: int, rejection: SampleRejected) -> None:
        self._dropped[rejection.reason] += 1
        self._ports.observer.dropped(uid, rejection.reason, rejection.detail)
        self._let_go([uid])

    def _let_go(self, uids: Collection[int]) -> None:
        """Give back permits of prompts that are dropped, or trained on and live."""
        self._permits.release(uids)
        if self._ports.store is not None:
            self._ports.store.release(uids)


async def _itself(found: Place) -> Place:
    return found


async def _begun(prompt: Prompt, turns: Awaitable[Sequence[SampledTurn]]) -> Place:
    return StartedTrajectory(prompt, await turns)


def _filter(schedule: Schedule, state: ControllerState) -> SpreadFilter | None:
    if schedule.groups is None:
        return None
    found = SpreadFilter(schedule.groups, schedule.group_size, state.spread)
    samples = [member.sample for member in state.line if member.sample is not None]
    unscored = [member.uid for member in state.line if member.sample is None]
    found.resume(samples, unscored, state.next_uid)
    return found


def _buffer(schedule: Schedule, updates: int) -> SampleBuffer:
    if schedule.plan is not None:
        return PlannedBuffer(schedule.batch_size, schedule.plan, updates)
    if schedule.takes_first_arrived:
        return CompletionBuffer(schedule.batch_size, schedule.group_size, NO_DEADLINE, updates)
    if schedule.kind.order == "admission":
        return SampleBuffer()
    return CompletionBuffer(schedule.batch_size, schedule.group_size, schedule.bound, updates)
