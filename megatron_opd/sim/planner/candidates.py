"""Defines what a search chooses between: sizes of learner and servers, schedules, and splits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.config.schedule import ScheduleConfig
from megatron_opd.sim.costs import EngineCost, LearnerCost, ScoreCost, SyncCost


@dataclass(frozen=True, slots=True)
class LearnerSize:
    """Holds one layout of the learner, what an update costs in it, and a rank's bytes."""

    parallel: ParallelConfig
    cost: LearnerCost
    rank_bytes: int = 0

    @property
    def gpus(self) -> int:
        """Returns the number of its ranks."""
        return self.parallel.world_size


@dataclass(frozen=True, slots=True)
class StudentSize:
    """Holds one size of a student server and what it costs.

    sync: a weight sync that takes no longer than that of any split with such servers. in_flight:
    requests that the KV cache has room for, at the mean length.
    """

    tp: int
    ep: int
    cost: EngineCost
    sync: SyncCost
    in_flight: int


@dataclass(frozen=True, slots=True)
class Teacher:
    """Holds one size of a teacher's server and what it costs."""

    tp: int
    ep: int
    cost: ScoreCost


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """Holds a schedule, its bound on staleness in updates, and its permits."""

    config: ScheduleConfig
    bound: int
    permits: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """Describes one choice. teacher: None where the run has none. concurrency: of rollouts.

    scoring: requests at the teacher's servers at once.
    """

    learner: LearnerSize
    student: StudentSize
    servers: int
    teacher: Teacher | None
    teachers: int
    schedule: ScheduleChoice
    concurrency: int
    scoring: int

    @property
    def gpus(self) -> tuple[int, int, int]:
        """Returns the GPUs of student, teacher and learner."""
        scored = 0 if self.teacher is None else self.teachers * self.teacher.tp
        return self.servers * self.student.tp, scored, self.learner.gpus


@dataclass(frozen=True, slots=True)
class Space:
    """Holds all that a search may choose, every part of which fits the card.

    teachers: empty where the run has none. shares: of the requests that could be in flight, which
    become rollout.concurrency. concurrency, servers, scorers: fixed numbers instead. scoring:
    the least scoring.concurrency; fixed_scoring: it is also the most.
    """

    gpus: int
    learners: tuple[LearnerSize, ...]
    students: tuple[StudentSize, ...]
    teachers: tuple[Teacher, ...]
    schedules: tuple[ScheduleChoice, ...]
    shares: tuple[float, ...] = (1.0, 0.5)
    concurrency: int | None = None
    servers: int | None = None
    scorers: int | None = None
    scoring: int = 32
    fixed_scoring: bool = False
    _splits: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = field(
        default_factory=dict[tuple[int, int, int], tuple[tuple[int, int], ...]], compare=False
    )

    def splits(self, world: int, student_tp: int, teacher_tp: int) -> tuple[tuple[int, int], ...]:
        """Return (student servers, teacher servers) beside a learner of `world` GPUs.

        Neither could be one more; teacher_tp 0: there is no teacher.
        """
        key = world, student_tp, teacher_tp
        if key not in self._splits:
            self._splits[key] = tuple(self._split(self.gpus - world, student_tp, teacher_tp))
        return self._splits[key]

    def _split(self, room: int, student_tp: int, teacher_tp: int) -> Iterator[tuple[int, int]]:
        most = room // student_tp
        if not teacher_tp:
            count = most if self.servers is None else self.servers
            if 1 <= count <= most:
                yield count, 0
            return
        for count in range(1, most + 1) if self.servers is None else (self.servers,):
            left = room - count * student_tp
            scorers = left // teacher_tp if self.scorers is None else self.scorers
            if scorers < 1 or scorers * teacher_tp > left:
                continue
            if self.servers is None and left - scorers * teacher_tp >= student_tp:
                continue  # one more student server fits beside as many teachers
            yield count, scorers

    def in_flight(
        self, share: float, student: StudentSize, servers: int, schedule: ScheduleChoice
    ) -> int:
        """Return rollout.concurrency: a share of what permits and KV cache let be in flight."""
        if self.concurrency is not None:
            return self.concurrency
        most = servers * min(student.cost.max_running, student.in_flight)
        return max(1, math.floor(share * min(schedule.permits, most)))

    def scoring_of(self, teachers: int) -> int:
        """Return scoring.concurrency: two requests for each server at least."""
        return self.scoring if self.fixed_scoring else max(self.scoring, 2 * teachers)

    def candidate(
        self,
        learner: LearnerSize,
        student: StudentSize,
        teacher: Teacher | None,
        split: tuple[int, int],
        schedule: ScheduleChoice,
        share: float,
    ) -> Candidate:
        """Make one candidate."""
        servers, teachers = split
        return Candidate(
            learner=learner,
            student=student,
            servers=servers,
            teacher=teacher,
            teachers=teachers,
            schedule=schedule,
            concurrency=self.in_flight(share, student, servers, schedule),
            scoring=self.scoring_of(teachers),
        )

    def all(self) -> Iterator[Candidate]:
        """Yield every candidate."""
        for learner in self.learners:
            for student in self.students:
                for teacher in self.teachers or (None,):
                    tp = 0 if teacher is None else teacher.tp
                    for split in self.splits(learner.gpus, student.tp, tp):
                        for schedule in self.schedules:
                            for share in self.shares:
                                yield self.candidate(
                                    learner, student, teacher, split, schedule, share
                                )
