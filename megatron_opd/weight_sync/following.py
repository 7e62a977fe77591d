"""Sends the learner's weights to teachers that follow the student, as to the student's servers.

A weight sync to version v first brings each teacher to the version that its source has after v
updates (config/sources.py), if its servers hold another one, and then the student. In this order a
learner that is released early (weight_sync.overlap) still has v while the teachers are sent it.
What differs from the student's weight sync is only whose servers they are, and what of the learner
is sent: each teacher has a transport of its own, for which its section stands in the student's
place. Retries, lost servers and verification are the session's (session.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_opd.config.roles import STUDENT, Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.sources import TeacherSource
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.records.types import LearnerTurn
from megatron_opd.weight_sync.loops import run_until_first_ends
from megatron_opd.weight_sync.session import WeightSync


def as_students(config: Config, role: Role) -> Config:
    """Return the configuration by which a transport takes a teacher's servers for the student's.

    They get weights as they are (no round_to), and the learner waits until they have them.
    """
    settings = config.weight_sync.model_copy(update={"round_to": None, "overlap": False})
    return config.model_copy(update={"student": section_of(config, role), "weight_sync": settings})


@dataclass(frozen=True, slots=True)
class Follower:
    """Keeps one teacher's servers at what its source says."""

    sync: WeightSync
    source: TeacherSource

    async def follow(self, updates: int) -> WeightSyncReport | None:
        """Bring the servers to the version after so many updates; None: they hold it."""
        version = self.source.version_at(updates)
        if self.sync.live.version == version:
            return None
        return await self.sync.sync(version)

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Sync again whenever only servers without weights are left; see WeightSync.serve_on."""

        def version() -> int | None:
            updates = current()
            return None if updates is None else self.source.version_at(updates)

        await self.sync.serve_on(version, learner)


class FollowedSync:
    """Performs the weight syncs of a run's student and of its teachers that follow.

    Implements controller.ports.WeightSyncer.
    """

    def __init__(self, student: WeightSync, teachers: Mapping[Role, Follower]) -> None:
        self._student, self._teachers = student, teachers

    @property
    def _all(self) -> tuple[WeightSync, ...]:
        return (self._student, *(teacher.sync for teacher in self._teachers.values()))

    async def open(self, used: Collection[Role] = ()) -> None:
        """Connect the learner with all servers. used: roles of WeightSync.open's `used`."""
        await self._student.open(used=STUDENT in used)
        for role, teacher in self._teachers.items():
            await teacher.sync.open(used=role in used)

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        """Make `version` live on the student's servers, and what follows from it on teachers'.

        Raises WeightSyncFailed.
        """
        found = [await teacher.follow(version) for teacher in self._teachers.values()]
        report = await self._student.sync(version, turn)
        reports = [each for each in found if each is not None]
        return replace(report, teachers=tuple(reports)) if reports else report

    async def make_room(self) -> None:
        """Return once the learner has the memory that it trains with."""
        await self._student.make_room()

    async def restore_memory(self, urls: Sequence[str]) -> None:
        """Leave student servers with all their memory."""
        await self._student.restore_memory(urls)

    async def until_none_serves(self) -> None:
        """Return once no student server is left that holds the live version."""
        await self._student.until_none_serves()

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Let servers of each role serve on; see WeightSync.serve_on."""
        await run_until_first_ends(
            self._student.serve_on(current, learner),
            *(teacher.serve_on(current, learner) for teacher in self._teachers.values()),
        )

    async def start_over(self) -> None:
        """Prepare all servers for another learner. WeightSyncFailed: too few are left."""
        for each in self._all:
            await each.start_over()

    async def remove_server(self, url: str, drop: Callable[[], None]) -> str | None:
        """Let a server leave its group and `drop` it; see WeightSync.remove_server."""
        owner = next((each for each in self._all if each.reaches(url)), self._student)
        return await owner.remove_server(url, drop)

    async def close(self) -> None:
        """Release what the servers hold of the transports."""
        for each in self._all:
            await each.close()
