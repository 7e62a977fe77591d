"""Bounds each stage of many candidates alone, once for all that share it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_opd.sim.planner.bounds import Bounds
from megatron_opd.sim.planner.candidates import (
    Candidate,
    LearnerSize,
    ScheduleChoice,
    Space,
    StudentSize,
    Teacher,
)

STAGES = ("learner", "student", "teacher")


@dataclass(frozen=True, slots=True)
class SearchNode:
    """Stands for all splits of one choice of sizes, schedule and concurrency."""

    learner: LearnerSize
    student: StudentSize
    teacher: Teacher | None
    schedule: ScheduleChoice
    share: float


class Quick:
    """Computes the bounds of stages alone, each once."""

    def __init__(self, space: Space, bounds: Bounds) -> None:
        self._space, self._bounds = space, bounds
        self._students: dict[tuple[int, int, int, int], float] = {}
        self._teachers: dict[tuple[int, int, int], float] = {}
        self._learners: dict[tuple[int, int, int], float] = {}
        self._servers: dict[tuple[int, ...], list[tuple[float, str]]] = {}

    def nodes(self, bound: int) -> Iterator[SearchNode]:
        """Yield all nodes of a class."""
        space = self._space
        for schedule in space.schedules:
            if schedule.bound != bound:
                continue
            for learner in space.learners:
                for student in space.students:
                    for teacher in space.teachers or (None,):
                        for share in space.shares:
                            yield SearchNode(learner, student, teacher, schedule, share)

    def of_node(self, node: SearchNode, limited: Counter[str]) -> tuple[float, int]:
        """Return the least seconds of any split of a node, and how many splits there are.

        Adds to `limited` which stage limits how many.
        """
        rows, trained_s = self._rows(node), self._learner_s(node)
        least_s = math.inf
        for served_s, stage in rows:
            limited["learner" if trained_s >= served_s else stage] += 1
            least_s = min(least_s, max(trained_s, served_s))
        return least_s, len(rows)

    def expanded(self, node: SearchNode) -> Iterator[tuple[Candidate, float]]:
        """Yield the candidates of a node and their bounds."""
        trained_s = self._learner_s(node)
        for split, (served_s, _) in zip(self._splits(node), self._rows(node), strict=True):
            yield self._candidate(node, split), max(trained_s, served_s)

    def stage(self, candidate: Candidate) -> str:
        """Return the stage whose own bound is the largest."""
        served_s, stage = self._served(candidate)
        trained_s = self._bounds.quick_learner(
            candidate.learner, candidate.student, candidate.schedule
        )
        return "learner" if trained_s >= served_s else stage

    def _splits(self, node: SearchNode) -> tuple[tuple[int, int], ...]:
        tp = 0 if node.teacher is None else node.teacher.tp
        return self._space.splits(node.learner.gpus, node.student.tp, tp)

    def _candidate(self, node: SearchNode, split: tuple[int, int]) -> Candidate:
        return self._space.candidate(
            node.learner, node.student, node.teacher, split, node.schedule, node.share
        )

    def _learner_s(self, node: SearchNode) -> float:
        key = id(node.learner), id(node.student), id(node.schedule)
        if key not in self._learners:
            self._learners[key] = self._bounds.quick_learner(
                node.learner, node.student, node.schedule
            )
        return self._learners[key]

    def _rows(self, node: SearchNode) -> list[tuple[float, str]]:
        """Return the seconds of each split's servers that take longest, and whose they are."""
        shares = self._space.shares
        key = (node.learner.gpus, id(node.student), id(node.teacher), id(node.schedule))
        key = (*key, shares.index(node.share))
        if key not in self._servers:
            self._servers[key] = [
                self._served(self._candidate(node, split)) for split in self._splits(node)
            ]
        return self._servers[key]

    def _served(self, candidate: Candidate) -> tuple[float, str]:
        student, schedule = candidate.student, candidate.schedule
        key = id(student), candidate.servers, candidate.concurrency, id(schedule)
        if key not in self._students:
            self._students[key] = self._bounds.quick_student(
                student, candidate.servers, candidate.concurrency, schedule
            )
        found = self._students[key], "student"
        teacher = candidate.teacher
        if teacher is None:
            return found
        asked = id(teacher), candidate.teachers, id(schedule)
        if asked not in self._teachers:
            self._teachers[asked] = self._bounds.quick_teacher(
                teacher, candidate.teachers, candidate.scoring, schedule
            )
        return max(found, (self._teachers[asked], "teacher"))
