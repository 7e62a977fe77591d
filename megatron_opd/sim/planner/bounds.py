"""Bounds from below how long a candidate takes for the updates of the window.

Proven, whatever the servers do: an update begins after the one before and what that holds the
learner for; a sample beyond the permits is admitted only after the weight sync that releases them;
what is admitted after a weight sync must be sampled, with its environment's answers, and scored
before it is trained on, each sample on its own, and all of them by as many servers as there are
(perfect overlap). `seconds` is the
longest path through these; `quick` takes each stage alone.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megatron_opd.sim.costs import EngineCost, LearnerCost, ScoreCost, SyncCost
from megatron_opd.sim.learner import update_seconds
from megatron_opd.sim.planner.candidates import (
    Candidate,
    LearnerSize,
    ScheduleChoice,
    StudentSize,
    Teacher,
)
from megatron_opd.sim.planner.demand import Demand, DoubleArray
from megatron_opd.sim.planner.sampling import SamplingBounds


class Bounds:
    """Computes bounds for one demand. overlaps: weight_sync.overlap. spare: see sampling.py.

    spare must be no less than any candidate's bound on staleness, which is how often a response may
    be sampled on with new weights.
    """

    def __init__(self, demand: Demand, *, spare: int, overlaps: bool) -> None:
        self._demand, self._spare, self._overlaps = demand, spare, overlaps
        self._samplings: dict[EngineCost, SamplingBounds] = {}
        self._updates: dict[LearnerCost, list[float]] = {}
        self._scores: dict[ScoreCost, tuple[DoubleArray, DoubleArray]] = {}
        self._slowest: dict[tuple[EngineCost, ScoreCost | None, int, int], float] = {}

    # ------------------------------------------------------------ one stage alone

    def quick_learner(
        self, learner: LearnerSize, student: StudentSize, schedule: ScheduleChoice
    ) -> float:
        """Return the least seconds of the learner alone."""
        window, cost = self._demand.window, learner.cost
        held_s = self._held_s(student.sync) * self._num_syncs(window.first, window.last, schedule)
        return float(self._least_N(cost)[window.first : window.last].sum()) + held_s

    def quick_student(
        self, student: StudentSize, servers: int, slots: int, where: ScheduleChoice
    ) -> float:
        """Return the least seconds of the student's servers alone."""
        window = self._demand.window
        pauses = self._num_syncs(window.first, window.last, where) - self._overlaps
        first = self._first_sample(self._next_sync(window.first, where), where)
        stop = window.last * self._demand.batch_size
        if first >= stop:
            return 0.0
        slots = min(slots, where.permits)
        sampling = self._sampling(student.cost)
        sampled_s = sampling.seconds(first, stop, servers, slots, where.permits, 0.0)
        return sampled_s + max(0, pauses) * student.sync.paused_s

    def quick_teacher(
        self, teacher: Teacher, servers: int, scoring: int, where: ScheduleChoice
    ) -> float:
        """Return the least seconds of the teacher's servers alone."""
        window = self._demand.window
        first = self._first_sample(self._next_sync(window.first, where), where)
        stop = window.last * self._demand.batch_size
        if first >= stop:
            return 0.0
        sums, _ = self._scored(teacher.cost)
        return float(sums[stop] - sums[first]) / min(servers, scoring, where.permits)

    # ------------------------------------------------------------ all of them

    def seconds(self, candidate: Candidate, *, guess: bool = False) -> float:
        """Return the least seconds from the end of update `first` to that of update `last`.

        guess: what they may be instead, which is no bound: the slowest response is taken to be
        slowed down by its server's share of the others. after, synced: least times of the end of an
        update, and of the weight sync that follows it.
        """
        demand, schedule, sync = self._demand, candidate.schedule, candidate.student.sync
        window, batch = demand.window, demand.batch_size
        every = schedule.config.sync_every
        trained = self._trained(candidate.learner.cost)
        after, synced = {window.first: 0.0}, dict[int, float]()
        points = range(self._next_sync(window.first, schedule), window.last, every)
        if window.first in points:
            synced[window.first] = sync.sync_s
        for update in range(window.first + 1, window.last + 1):
            held_s = self._held_s(sync) if (update - 1) % every == 0 else 0.0
            begins_s = after[update - 1] + held_s
            for point in points:
                first, stop = self._first_sample(point, schedule), update * batch
                if point >= update or first >= stop:
                    break
                pauses = max(0, (update - 1) // every - point // every - self._overlaps)
                held_s = self._occupied_s(candidate, trained, point, update, pauses)
                ready_s = self._ready_s(candidate, first, stop, pauses, held_s, guess=guess)
                begins_s = max(begins_s, synced[point] + ready_s)
            after[update] = begins_s + trained[update - 1]
            if update % every == 0:
                synced[update] = self._synced_s(candidate, update, after[update], synced)
        return after[window.last]

    def _synced_s(
        self, candidate: Candidate, update: int, after_s: float, synced: dict[int, float]
    ) -> float:
        """Return the least time of the end of the weight sync after an update that ends `after_s`.

        One comes after the other. With in_flight keep it waits for all that is sampled: where no
        rollout waits for another, that is all that the weight sync before let be admitted. It may
        begin before those do, and so not wait for them, as soon as that one ends: with overlap, or
        where updates take no time. Of trajectories it waits for turns alone.
        """
        schedule, student = candidate.schedule, candidate.student
        before = update - schedule.config.sync_every
        begins_s = max(after_s, synced.get(before, 0.0))
        keeps = schedule.config.in_flight == "keep" and not self._demand.plays
        waits = keeps and candidate.concurrency >= schedule.permits
        follows = self._overlaps or not any(self._trained(candidate.learner.cost)[before:update])
        if waits and not follows and before in synced:
            first = self._first_sample(before, schedule)
            stop = min(self._first_sample(update, schedule), len(self._tokens_N))
            if first < stop:
                begins_s = max(
                    begins_s,
                    synced[before] + self._sampled_s(candidate, first, stop, 0.0),
                    synced[before] + self._slowest_s(student, None, first, stop),
                )
        return begins_s + student.sync.sync_s

    def _sampled_s(self, candidate: Candidate, first: int, stop: int, held_s: float) -> float:
        permits = candidate.schedule.permits
        slots = min(candidate.concurrency, permits)
        sampling = self._sampling(candidate.student.cost)
        return sampling.seconds(first, stop, candidate.servers, slots, permits, held_s)

    def _occupied_s(
        self, candidate: Candidate, trained: list[float], point: int, update: int, syncs: int
    ) -> float:
        """Return the permit-seconds of samples in training or weight sync.

        Of the time from the end of the sync after update `point` to the beginning of `update`,
        between which there are `syncs`. A batch keeps its permits until it is synced. Time in which
        servers are paused is left out, in which one update may run.
        """
        sync = candidate.student.sync
        beside_s = sync.paused_s if self._overlaps else 0.0
        every, batch = candidate.schedule.config.sync_every, self._demand.batch_size
        # one that began before the sync's end is not all in that time
        begun = range(point + 1 + self._overlaps, update)
        seconds = sum(
            (each - (each - 1) // every * every) * max(0.0, trained[each - 1] - beside_s)
            for each in begun
        )
        return batch * (seconds + syncs * every * (sync.sync_s - sync.paused_s))

    def _ready_s(
        self,
        candidate: Candidate,
        first: int,
        stop: int,
        pauses: int,
        held_s: float,
        *,
        guess: bool,
    ) -> float:
        """Return the least time from the admission of sample `first` until all are scored."""
        permits, student = candidate.schedule.permits, candidate.student
        paused_s, waits_s = pauses * student.sync.paused_s, 0.0
        if candidate.teacher is not None:
            sums, _ = self._scored(candidate.teacher.cost)
            waits_s = float(sums[stop] - sums[first])
            # samples are scored while the student's servers are paused, too
            held_s += max(0.0, waits_s - paused_s * min(candidate.scoring, permits))
        sampled_s = paused_s + self._sampled_s(candidate, first, stop, held_s)
        slowest_s = self._slowest_s(student, candidate.teacher, first, stop)
        if guess:
            beside_s = self._sampling(student.cost).added_s(first, stop)
            slowest_s += beside_s / min(candidate.servers, candidate.concurrency)
        if candidate.teacher is None:
            return max(sampled_s, slowest_s)
        servers = min(candidate.teachers, candidate.scoring, permits)
        scored_s = waits_s / servers
        return max(sampled_s, scored_s, slowest_s)

    def _slowest_s(
        self, student: StudentSize, teacher: Teacher | None, first: int, stop: int
    ) -> float:
        """Return the time of the sample that takes longest, as if it were alone."""
        key = student.cost, None if teacher is None else teacher.cost, first, stop
        if key not in self._slowest:
            alone_N = self._sampling(student.cost).alone_N[first:stop]
            if teacher is not None:
                alone_N = alone_N + self._scored(teacher.cost)[1][first:stop]
            self._slowest[key] = float(alone_N.max())
        return self._slowest[key]

    # ------------------------------------------------------------ parts

    @cached_property
    def _tokens_N(self) -> DoubleArray:
        return (self._demand.prompt_N + self._demand.response_N).astype(np.float64)

    def _sampling(self, cost: EngineCost) -> SamplingBounds:
        if cost not in self._samplings:
            self._samplings[cost] = SamplingBounds(cost, self._demand, self._spare)
        return self._samplings[cost]

    def _scored(self, cost: ScoreCost) -> tuple[DoubleArray, DoubleArray]:
        """Return the sums over the first samples of a server's seconds, and each sample's."""
        if cost not in self._scores:
            alone_N = cost.request_s + self._tokens_N * cost.token_s
            self._scores[cost] = np.concatenate([[0.0], np.cumsum(alone_N)]), alone_N
        return self._scores[cost]

    def _trained(self, cost: LearnerCost) -> list[float]:
        """Return the seconds of every update."""
        if cost not in self._updates:
            demand = self._demand
            self._updates[cost] = [
                update_seconds(demand.batch(update + 1), cost, demand.mini_batches)
                if update >= demand.window.first
                else 0.0
                for update in range(demand.window.last)
            ]
        return self._updates[cost]

    def _least_N(self, cost: LearnerCost) -> DoubleArray:
        """Return the least seconds of every update: those of evenly loaded ranks."""
        demand = self._demand
        alone_N = self._tokens_N * (cost.token_s + self._tokens_N / 2 * cost.token_context_s)
        trained_N = alone_N[: demand.window.last * demand.batch_size]
        minis = trained_N.reshape(demand.window.last, demand.mini_batches, -1)
        busiest = np.maximum(minis.sum(axis=2) / cost.ranks, minis.max(axis=2))
        return cost.update_s + busiest.sum(axis=1)

    def _held_s(self, sync: SyncCost) -> float:
        """Return for how long a weight sync keeps the next update waiting."""
        if not self._overlaps:
            return sync.sync_s
        held_s = sync.sync_s if sync.held_s is None else sync.held_s
        return min(held_s, sync.sync_s - sync.paused_s)

    def _first_sample(self, sync: int, schedule: ScheduleChoice) -> int:
        """Return the first sample that is admitted only once the sync after update `sync` is done.

        Until then no more than the batches before the one before it have released their permits.
        """
        before = sync - schedule.config.sync_every
        return before * self._demand.batch_size + schedule.permits

    def _next_sync(self, update: int, schedule: ScheduleChoice) -> int:
        """Return the first update from `update` on that a weight sync follows."""
        every = schedule.config.sync_every
        return -(-update // every) * every

    def _num_syncs(self, first: int, last: int, schedule: ScheduleChoice) -> int:
        """Return how many weight syncs lie between the ends of two updates."""
        every = schedule.config.sync_every
        return (last - 1) // every - (first - 1) // every
