"""Schedules a run: loops under one TaskGroup; one that fails stops the run with its cause.

    PromptSource --permit--> rollout --> scoring --> SampleBuffer --> Batcher --> Learner
         ^                (student fleet)  (teachers)  (versions)   (B samples)  (Megatron)
         |                       ^                                                   |
         |                       +------------------- WeightSync <-------------------+
         +------- permits released when the new version is live ----+

| loop      | consumes         | waits for           | unblocked by                            |
|-----------|------------------|---------------------|-----------------------------------------|
| admit     | prompts          | a permit            | a version going live, a dropped sample  |
| rollout-i | admitted prompts | an engine slot (i)  | a rollout finishing                     |
| score-i   | rollouts         | a teacher slot (i)  | a score finishing                       |
| recover   | lost arrays      | a data worker lost  | -                                       |
| learn     | scored samples   | (h + 1) B           | score; the weight sync of its update,   |
|           |                  |                     | or that sync's release of the learner   |
| sync      | updated weights  | every n-th update   | learn; with in_flight keep the rollouts |
| serve on  | added servers    | no server left      | the supervisor, once one is up again    |

Invariants: every admitted prompt is trained on, dropped with a counted reason, or reported as in
flight at the end; it holds one permit until then (buffer/permits.py); no more prompts are admitted
than the remaining updates can consume, so a run that ends by itself has nothing in flight; where
the prompts end first, what fills no batch is dropped (incomplete_batch); a drop takes the rest of
its group along (buffer/groups.py), and a group may be dropped for its rewards (buffer/spread.py).
Updates and weight syncs alternate, since both use the learner's only set of weights, unless a
weight sync releases the learner: then one update runs beside it. Weight syncs are one at a time, in
order; several updates may come before one (sync_every), and what happens to the responses in flight
is in_flight.py's. A version is named after the updates that its weights have seen. What is kept is
the state after a weight sync: one that is followed by a checkpoint releases nothing (turn.py), and
a run that is told to end early first finishes the update that it is making, and the weight sync
that follows.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from megatron_opd.buffer.batcher import Batcher, BatchIncomplete
from megatron_opd.buffer.buffer import SampleBuffer
from megatron_opd.buffer.completion import NO_DEADLINE, CompletionBuffer
from megatron_opd.buffer.groups import GroupIncomplete, SampleGroups
from megatron_opd.buffer.permits import (
    Permits,
    TooStale,
    check_staleness,
    staleness_versions,
)
from megatron_opd.buffer.planned import PlannedBuffer
from megatron_opd.buffer.rejection import SampleRejected, SamplesLost
from megatron_opd.buffer.spread import SpreadFilter, Verdict
from megatron_opd.controller.errors import EverythingDropped, LearnerDiverged, LoopFailed
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.loops import Starter, being_cancelled, start
from megatron_opd.controller.ports import Ports, SampleStore
from megatron_opd.controller.schedule import Schedule
from megatron_opd.controller.slots import Slots
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState, Member, Place, place
from megatron_opd.controller.turn import Turn
from megatron_opd.metrics.types import Accounting, Depths
from megatron_opd.types import (
    AnyRollout,
    AnySample,
    Batch,
    HeldRollout,
    HeldSample,
    Prompt,
)

# fewer drops in a row than this never stop a run, however few permits it has
MIN_DROPS_IN_A_ROW = 16


class Controller:
    """Runs one schedule once, or continues from `state`. Use from one event loop.

    With a state its version must be live on every engine, and the prompts must start at next_uid.
    """

    def __init__(
        self, schedule: Schedule, ports: Ports, state: ControllerState = NOTHING_YET
    ) -> None:
        self._schedule, self._ports = schedule, ports
        holders = [member.uid for member in state.line]
        self._permits = Permits(schedule.permits, holders)
        self._buffer = _buffer(schedule, state.updates)
        self._rollouts = Rollouts(schedule.in_flight, ports.weight_sync.stranded)
        self._batcher = Batcher(self._buffer, schedule.batch_size, schedule.kind.held)
        self._groups = SampleGroups(
            schedule.group_size, state.broken_groups, state.scored_in_groups
        )
        self._unsynced: list[Batch] = []
        """Trained on since the last weight sync that began."""
        self._trained: asyncio.Queue[tuple[list[Batch], Turn]] = asyncio.Queue()
        self._num_handed_over = 0
        self._learner = asyncio.Lock()
        """Held by an update or a weight sync while it uses the learner."""
        self._serving: list[asyncio.Task[None]] = []
        self._moved = asyncio.Event()
        permits = self._permits.total
        # oldest first: the front of the line is what the next batch waits for
        self._to_score = Slots("score", min(schedule.score_slots, permits), self._score)
        self._to_roll_out = Slots(
            "rollout", min(schedule.rollout_slots, permits), self._roll_out, self._to_score
        )
        # admitted and not scored: the prompt, or the rollout that waits for its score
        self._unscored: dict[int, Prompt | AnyRollout] = {}
        self._num_scoring = 0
        self._dropped = Counter(state.dropped)
        self._dropped_in_a_row = state.dropped_in_a_row
        self._num_admitted, self._num_consumed = state.admitted, state.consumed
        self._num_updates, self._version = state.updates, state.version
        self._next_uid = state.next_uid
        self._interrupted = False
        self._filter = _filter(schedule, state)
        # group -> its last sample, while what becomes of the group depends on others
        self._undecided: dict[int, AnySample] = {}
        self._counted: set[int] = set()
        """Sampled anew since their arrays were lost, after their scores had been counted."""
        for member in state.line:
            self._rejoin(member)

    async def run(self) -> Accounting:
        """Make the updates, drain, and account for every prompt.

        Raises LoopFailed when a loop or the guard fails. Cancellation (Ctrl-C) ends every loop and
        is re-raised; in all cases `accounting` is complete afterwards and the observer informed.
        """
        clock = asyncio.get_running_loop().time
        self._ports.observer.started(clock(), self._depths())
        try:
            # a task of its own: in Python 3.11 a TaskGroup leaves a cancellation count behind
            await asyncio.create_task(self._run_loops(), name="loops")
        except asyncio.CancelledError:
            self._interrupted = True
            raise
        except BaseExceptionGroup as failures:
            if being_cancelled():
                # errors of loops whose connections Ctrl-C closes are no failure of the run
                self._interrupted = True
                raise asyncio.CancelledError from failures
            raise await self._deepest_cause(failures) from failures
        finally:
            self._ports.observer.ended(self.accounting, clock())
        return self.accounting

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

    def end_early(self) -> None:
        """Let `run` end after the update that is being made, if one is, and keep the state."""
        self._batcher.stop()

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
        )

    def _whole(self, found: Prompt | AnyRollout | AnySample) -> Awaitable[Place]:
        """Ask for the arrays of what is held elsewhere."""
        if isinstance(found, HeldRollout | HeldSample):
            assert self._ports.store is not None
            return self._ports.store.whole(found)
        return _itself(found)

    def _rejoin(self, member: Member) -> None:
        self._buffer.admit(member.uid, member.oldest_version(self._version))
        if member.sample is not None:
            self._buffer.put(member.sample)
        elif member.rollout is not None:
            self._rolled_out(member.rollout)
            self._to_score.put(member.uid)
        elif member.prompt is not None:
            self._unscored[member.uid] = member.prompt
            self._to_roll_out.put(member.uid)

    async def _run_loops(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._start_loops(partial(start, group))
            self._to_roll_out.open(group)
            self._to_score.open(group)

    def _start_loops(self, start: Starter) -> None:
        start("learn", self._learn())
        self._serving = [start("admit", self._admit()), start("sync", self._sync())]
        serve_on = self._ports.weight_sync.serve_on(self._current, self._learner)
        self._serving.append(start("serve on", serve_on))
        self._serving.append(start("depths", self._tell_depths()))
        if self._ports.store is not None:
            self._serving.append(start("recover", self._recover(self._ports.store)))
        if self._ports.guard is not None:
            self._serving.append(start("health", self._ports.guard.watch()))

    async def _admit(self) -> None:
        prompts = iter(self._ports.prompts)
        while True:
            await self._admit_enough(prompts)
            self._buffer.close()
            while self._buffer.closed:  # until a sample is lost, whose prompt may be dropped
                await self._buffer.changed()

    async def _admit_enough(self, prompts: Iterator[Prompt]) -> None:
        while await self._room_for_one_more():
            await self._permits.free()
            prompt = next(prompts, None)  # chosen no earlier than it is admitted
            if prompt is None:
                break
            await self._permits.acquire(prompt.uid)
            self._next_uid = prompt.uid + 1
            if self._groups.broken(prompt.uid):
                self._permits.release([prompt.uid])
                continue
            self._buffer.admit(prompt.uid, self._version)
            self._unscored[prompt.uid] = prompt
            self._num_admitted += 1
            self._ports.observer.admitted(prompt)
            self._to_roll_out.put(prompt.uid)
            self._moved.set()

    async def _room_for_one_more(self) -> bool:
        """Wait until the updates can consume another prompt; False once they never will."""
        schedule = self._schedule
        while True:
            left = self._num_admitted - self._dropped.total()
            if left < schedule.samples_by(self._version):
                if self._buffer.waiting_for_score < schedule.most_unscored:
                    return True
            elif left >= schedule.samples and self._buffer.waiting_for_score == 0:
                return False
            await self._buffer.changed()

    async def _roll_out(self, uid: int) -> bool:
        prompt = self._unscored[uid]
        assert isinstance(prompt, Prompt), "not rolled out"
        try:
            self._groups.check(uid)
            rollout = await self._rollouts.run(partial(self._ports.rollout.generate, prompt))
        except SampleRejected as rejection:
            self._drop(uid, rejection)
            return False
        self._ports.observer.rolled_out(rollout)
        self._rolled_out(rollout)
        self._moved.set()
        return True

    def _rolled_out(self, rollout: AnyRollout) -> None:
        self._unscored[rollout.prompt.uid] = rollout
        self._num_scoring += 1

    async def _score(self, uid: int) -> None:
        clock = asyncio.get_running_loop().time
        rollout = self._unscored[uid]
        assert not isinstance(rollout, Prompt), "rolled out"
        started_s = clock()
        try:
            self._groups.check(uid)
            sample = await self._ports.teacher.score(rollout)
            self._ports.observer.scored(sample, started_s, clock())
            self._groups.check(uid)  # it may have broken in the meantime
            self._check_age(sample)
            sample = self._ports.learner.prepare(sample)
        except SampleRejected as rejection:
            self._num_scoring -= 1
            self._drop(uid, rejection)
            return
        except SamplesLost:
            self._num_scoring -= 1
            self._sample_anew(rollout.prompt)
            return
        if uid in self._counted:
            self._counted.remove(uid)
            self._num_scoring -= 1
            self._put(sample)
            return
        last = self._groups.is_last(uid)
        if last:
            self._dropped_in_a_row = 0
        if self._filter is None:
            self._keep(sample)
            return
        self._filter.add(sample)
        if last:
            self._undecided[uid // self._schedule.group_size] = sample
            self._decide(self._filter.completed(sample.rollout.prompt))
        else:
            self._keep(sample)

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

    def _is_too_old(self, sample: AnySample) -> bool:
        """Return whether no update may train on a sample that a site has sampled."""
        if self._schedule.afar is None:  # what servers sample is never too old
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
        if self._schedule.afar is None:
            return
        line = self._buffer.in_line()
        self._drop_old([uid for uid, sample in line if sample and self._is_too_old(sample)])

    async def _recover(self, store: SampleStore) -> None:
        """Let what a lost data worker held be sampled anew; it keeps its permit and its place.

        Rollouts that wait for their scores are found out when they are scored, batches when they
        are trained on.
        """
        while True:
            for uid in sorted(await store.lost()):
                self._reopen(uid)
            self._moved.set()

    def _reopen(self, uid: int) -> None:
        sample = self._buffer.reopen(uid)
        if sample is not None:
            self._counted.add(uid)
            self._sample_anew(sample.rollout.prompt)

    def _sample_anew(self, prompt: Prompt) -> None:
        self._unscored[prompt.uid] = prompt
        self._to_roll_out.put(prompt.uid)

    def _holds(self, sample: AnySample) -> bool:
        return self._ports.store is None or self._ports.store.holds(sample)

    def _accept(self, sample: AnySample) -> None:
        """Count a score; what becomes of the sample is decided."""
        self._num_scoring -= 1
        self._groups.complete(sample.rollout.prompt.uid)
        if self._ports.curriculum is not None:
            self._ports.curriculum.judged(sample)

    def _decide(self, verdicts: Iterable[Verdict]) -> None:
        """Put the last samples of groups that are kept, and drop the groups that are not."""
        for verdict in verdicts:
            sample = self._undecided.pop(verdict.group)
            if verdict.reason is None:
                self._keep(sample)
            else:
                self._throw_away(sample, verdict.reason)

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

    def _drop(self, uid: int, rejection: SampleRejected) -> None:
        self._counted.discard(uid)
        self._remove(uid, rejection)
        self._break_up(uid)
        self._moved.set()
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

    def _remove(self, uid: int, rejection: SampleRejected) -> None:
        self._buffer.drop(uid)
        del self._unscored[uid]
        self._forget(uid, rejection)

    def _forget(self, uid: int, rejection: SampleRejected) -> None:
        self._dropped[rejection.reason] += 1
        self._ports.observer.dropped(uid, rejection.reason, rejection.detail)
        self._let_go([uid])

    def _let_go(self, uids: Collection[int]) -> None:
        """Give back permits of prompts that are dropped, or trained on and live."""
        self._permits.release(uids)
        if self._ports.store is not None:
            self._ports.store.release(uids)

    async def _learn(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._num_updates < self._schedule.updates:
            update = self._num_updates
            self._drop_all_old()
            samples = await self._batcher.next_batch()
            if len(samples) < self._schedule.batch_size:
                self._leave_out(samples)
                break
            # the learner's version, which may not be live yet
            batch = Batch(update=update, version=self._num_updates, samples=samples)
            check_staleness(batch, self._schedule.bound)
            async with self._learner:
                await self._ports.weight_sync.make_room()
                started_s = clock()
                try:
                    figures = await self._ports.learner.train(batch)
                except SamplesLost:
                    self._put_back(samples)
                    continue
                finished_s = clock()
            if not (math.isfinite(figures.loss) and math.isfinite(figures.grad_norm)):
                raise LearnerDiverged(
                    f"update {update}: loss {figures.loss}, gradient norm {figures.grad_norm}: "
                    "both must be finite"
                )
            self._num_updates += 1
            self._num_consumed += len(samples)
            self._ports.observer.trained(batch, figures, started_s, finished_s)
            self._unsynced.append(batch)
            if self._schedule.syncs_after(self._num_updates):
                await self._hand_over()
            else:
                self._ports.observer.updated(batch, self._depths())
                await self._trained.join()  # one update alone runs beside a weight sync
        if self._unsynced:  # the end came early
            await self._hand_over()
        await self._trained.join()
        early = self._batcher.stopped or self._num_updates < self._schedule.updates
        if early and self._ports.keeper is not None:
            await self._ports.keeper.at_end(self._num_updates, self.snapshot)
        # what remains waits for work that will never come
        self._to_roll_out.close()
        self._to_score.close()
        for task in self._serving:
            task.cancel()

    def _put_back(self, samples: Sequence[AnySample]) -> None:
        """Return a batch to the buffer, as some of it was lost before it was trained on."""
        self._buffer.put_back(samples)
        for sample in samples:
            if not self._holds(sample):
                self._reopen(sample.rollout.prompt.uid)

    def _leave_out(self, samples: Sequence[AnySample]) -> None:
        """Drop what is left of a batch when the prompts end: a learner needs equal shares."""
        for sample in samples:
            rejection = BatchIncomplete(len(samples), self._schedule.batch_size)
            self._forget(sample.rollout.prompt.uid, rejection)

    async def _hand_over(self) -> None:
        """Let the weights be synced; return once the next update may begin."""
        turn = Turn(self._learner)
        self._trained.put_nowait((self._unsynced, turn))
        self._num_handed_over += 1
        self._unsynced = []
        await turn.ended()

    async def _sync(self) -> None:
        while True:
            batches, turn = await self._trained.get()
            keeper, updates = self._ports.keeper, batches[-1].update + 1
            keeps = keeper is not None and keeper.due(updates)
            await turn.begin(early=not keeps)
            async with self._rollouts.held():
                report = await self._ports.weight_sync.sync(updates, turn)
            report = replace(report, learner_held_s=turn.held_s)
            self._version = updates
            self._buffer.wake()  # more may be admitted
            if self._ports.curriculum is not None:  # before a permit can admit another prompt
                self._ports.curriculum.settle()
            self._let_go([s.rollout.prompt.uid for b in batches for s in b.samples])
            self._ports.observer.weights_synced(batches[-1], report, self._depths())
            if keeper is not None and keeps:
                await keeper.after_update(updates, self.snapshot)
            turn.end()
            self._num_handed_over -= 1
            self._trained.task_done()

    def _current(self) -> int | None:
        """Return the version that the learner has; None: it is about to be synced anyway.

        Between two weight syncs it is newer than the live one.
        """
        return None if self._num_handed_over else self._num_updates

    def _depths(self) -> Depths:
        return Depths(
            rolling=self._buffer.waiting_for_score - self._num_scoring,
            scoring=self._num_scoring,
            buffered=self._buffer.scored,
            permits_in_use=self._permits.in_use,
            permits=self._permits.total,
        )

    async def _tell_depths(self) -> None:
        """Tell the observer how full the pipeline is, once for all that one turn of the loop did.

        A busy loop moves thousands of samples in a turn.
        """
        while True:
            await self._moved.wait()
            self._moved.clear()
            self._ports.observer.moved(self._depths())

    async def _deepest_cause(self, failures: BaseExceptionGroup[BaseException]) -> LoopFailed:
        # the first failure cancelled the other loops; their errors follow from it
        first = failures.exceptions[0]
        assert isinstance(first, LoopFailed), repr(first)
        if self._ports.guard is not None and first.loop != "health":
            cause = await self._ports.guard.diagnose()
            if cause is not None:
                return LoopFailed("health", cause)
        return first


async def _itself(found: Place) -> Place:
    return found


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
