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
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_opd.buffer.batcher import Batcher
from megatron_opd.buffer.permits import check_staleness
from megatron_opd.buffer.rejection import SampleRejected, SamplesLost
from megatron_opd.controller.errors import LearnerDiverged, LoopFailed
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.pipeline import Pipeline
from megatron_opd.controller.ports import Ports, SampleStore
from megatron_opd.controller.schedule import Schedule
from megatron_opd.controller.slots import Slots
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState, GroupMember
from megatron_opd.controller.turn import Turn
from megatron_opd.metrics.types import Accounting
from megatron_opd.records.types import Batch, Prompt

Starter = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]


class Controller(Pipeline):
    """Runs one schedule once, or continues from `state`. Use from one event loop.

    With a state its version must be live on every engine, and the prompts must start at next_uid.
    """

    def __init__(
        self, schedule: Schedule, ports: Ports, state: ControllerState = NOTHING_YET
    ) -> None:
        super().__init__(schedule, ports, state)
        self._rollouts = Rollouts(schedule.in_flight, ports.weight_sync)
        self._batcher = Batcher(self._buffer, schedule.batch_size, schedule.kind.held)
        self._unsynced: list[Batch] = []
        """Trained on since the last weight sync that began."""
        self._trained: asyncio.Queue[tuple[list[Batch], Turn]] = asyncio.Queue()
        self._num_handed_over = 0
        self._learner = asyncio.Lock()
        """Held by an update or a weight sync while it uses the learner."""
        self._serving: list[asyncio.Task[None]] = []
        permits = self._permits.total
        # oldest first: the front of the line is what the next batch waits for
        self._to_score = Slots("score", min(schedule.score_slots, permits), self._score)
        self._to_roll_out = Slots(
            "rollout", min(schedule.rollout_slots, permits), self._roll_out, self._to_score
        )
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
            if _being_cancelled():
                # errors of loops whose connections Ctrl-C closes are no failure of the run
                self._interrupted = True
                raise asyncio.CancelledError from failures
            raise await self._deepest_cause(failures) from failures
        finally:
            self._ports.observer.ended(self.accounting, clock())
        return self.accounting

    def end_early(self) -> None:
        """Let `run` end after the update that is being made, if one is, and keep the state."""
        self._batcher.stop()

    def _rejoin(self, member: GroupMember) -> None:
        self._buffer.admit(member.uid, member.oldest_version(self._version))
        if member.sample is not None:
            self._buffer.put(member.sample)
        elif member.rollout is not None:
            self._rolled_out(member.rollout)
            self._to_score.put(member.uid)
        elif member.prompt is not None:
            self._unscored[member.uid] = member.prompt
            if member.turns and self._ports.turns is not None:
                self._ports.turns.restore(member.uid, member.turns)
            self._to_roll_out.put(member.uid)

    def _queue(self, uid: int) -> None:
        self._to_roll_out.put(uid)

    async def _run_loops(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._start_loops(partial(_start, group))
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
            self._dropped_in_a_row = self._too_old_in_a_row = 0
        if self._filter is None:
            self._keep(sample)
            return
        self._filter.add(sample)
        if last:
            self._undecided[uid // self._schedule.group_size] = sample
            self._decide(self._filter.completed(sample.rollout.prompt))
        else:
            self._keep(sample)

    async def _recover(self, store: SampleStore) -> None:
        """Let what a lost data worker held be sampled anew; it keeps its permit and its place.

        Rollouts that wait for their scores are found out when they are scored, batches when they
        are trained on.
        """
        while True:
            for uid in sorted(await store.lost()):
                self._reopen(uid)
            self._moved.set()

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
            async with (self._ports.hold or self._rollouts).held():
                report = await self._ports.weight_sync.sync(updates, turn)
            report = replace(report, learner_held_s=turn.held_s)
            self._version = updates
            self._buffer.wake()  # more may be admitted
            if self._ports.curriculum is not None:  # before a permit can admit another prompt
                self._ports.curriculum.apply_noted()
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
            cause = await self._ports.guard.diagnose(first.cause)
            if cause is not None:
                return LoopFailed("health", cause)
        return first


def _start(
    group: asyncio.TaskGroup, name: str, loop: Coroutine[Any, Any, None]
) -> asyncio.Task[None]:
    """Run `loop` as a task of the group; its failure carries its name."""
    task = group.create_task(_named(name, loop), name=name)
    # one that is cancelled before its first step would be reported as never awaited
    task.add_done_callback(lambda _: loop.close())
    return task


async def _named(name: str, loop: Awaitable[None]) -> None:
    """Await `loop`; an exception is re-raised under the loop's name."""
    try:
        await loop
    except Exception as error:
        raise LoopFailed(name, error) from error


def _being_cancelled() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
