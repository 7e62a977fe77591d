"""Samples on a run's own servers. SitesOfRun (sites/learner_side.py) is the other SampleSource."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_opd.config.roles import (
    STUDENT,
    Role,
    answering,
    followers,
    student_share,
    teacher_roles,
)
from megatron_opd.config.sources import TeacherSource
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.ports import Engines, Guard
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data_workers.checks import PlayedRules
from megatron_opd.data_workers.fleet_calls import sampled_by_workers, scored_by_workers
from megatron_opd.data_workers.played import PlayedByWorkers
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.data_workers.reward import make_reward
from megatron_opd.environments.playing import Playing
from megatron_opd.fleet.bill import billed
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.imitation import ImitatingGenerator, StudentIds
from megatron_opd.rollout.resumed import ResumeCounts, ResumedTrajectories
from megatron_opd.rollout.scorer import ChangingWeights, FleetScorer
from megatron_opd.rollout.student_share import StudentShare
from megatron_opd.rollout.trajectories import TrajectoryGenerator
from megatron_opd.run.stages import Ready
from megatron_opd.transport.remote_learner import WeightsOfRole
from megatron_opd.weight_sync.following import FollowedSync, Follower, as_students
from megatron_opd.weight_sync.live import LiveVersion
from megatron_opd.weight_sync.memory import MemoryTurns
from megatron_opd.weight_sync.session import Lose, WeightSync
from megatron_opd.weight_sync.transport import transport_kind
from sglang_bridge.fleet import Fleet


class OwnServers:
    """Samples on the run's own student servers, to which the learner's weights go.

    Args:
        ready: the run.
        fleets: of all roles.
        pool: data workers through which samples and scores go; None: they come here.
        lose: gives up a student server that a weight sync cannot reach.
        playing: plays trajectories; None: data workers do, or each prompt is answered once.
    """

    def __init__(
        self,
        ready: Ready,
        fleets: Mapping[Role, Fleet],
        pool: WorkerPool | None,
        lose: Lose,
        playing: Playing | None = None,
    ) -> None:
        config, student = ready.config, fleets[STUDENT]
        self._config, self._prepared = config, ready.prepared
        self._fleets, self._pool, self._playing = fleets, pool, playing
        self._used = [role for role in fleets if ready.used(role)]
        self._opened = False
        self.resumed = ResumeCounts()
        make_transport = transport_kind(config.weight_sync).fleet_part
        transport = make_transport(student, ready.remote.move_weights, config)
        memory = MemoryTurns(student, ready.remote) if config.schedule.time_shared else None
        sync = WeightSync(student, ready.remote, transport, config.weight_sync, lose, memory)
        self._followers = {
            role: _follower(ready, role, source, fleets[role], lose)
            for role, source in followers(config).items()
        }
        self.weights, self._live = FollowedSync(sync, self._followers), sync.live

    def teacher_versions(self) -> Mapping[Role, LiveVersion]:
        """Return the versions of what scores and changes, the student's own servers included."""
        theirs = {role: each.sync.live for role, each in self._followers.items()}
        return {STUDENT: self._live, **theirs}

    async def open(self, guard: Guard, supervisor: Supervisor) -> None:
        """Connect the learner and the servers. Raises WeightSyncFailed."""
        self._opened = True
        await self.weights.open(self._used)

    async def wait_ready(self, guard: Guard) -> None:
        """Return at once: the servers are there."""

    def engines(self) -> Engines:
        """Return what samples on the student's servers, and scores on the teachers'."""
        config, prepared, pool, fleets = self._config, self._prepared, self._pool, self._fleets
        run_id, vocab_size = uuid.uuid4().hex[:8], prepared.student.vocab_size
        reward = make_reward(prepared.judge, prepared.ending, pool)
        sample = score = None
        if pool is not None:
            roles = teacher_roles(config)
            sizes = {name: prepared.vocab_sizes[role] for name, role in roles.items()}
            sample = sampled_by_workers(pool, fleets[STUDENT])
            score = scored_by_workers(pool, sizes)
        ends = prepared.ending.token_ids
        sampler = RolloutGenerator(config, fleets[STUDENT], vocab_size, run_id, ends, sample)
        versions: dict[Role, ChangingWeights] = dict(self.teacher_versions())
        share = student_share(config)
        if share is not None:
            student = fleets[STUDENT]
            versions[STUDENT] = StudentShare(self._live, share, lambda: student.in_flight)
        reader = None if prepared.other is None else prepared.other.reader
        scorer = FleetScorer(config, fleets, vocab_size, run_id, reward, score, versions, reader)
        hold, seed = Rollouts(config.schedule.in_flight, self.weights), config.run.seed
        if config.environment is not None and pool is not None:
            slots, rules = config.rollout.concurrency, PlayedRules.of(config, vocab_size)
            played = PlayedByWorkers(pool, fleets[STUDENT], slots, hold, rules)
        elif self._playing is not None:
            playing, readers = self._playing, prepared.readers
            student = fleets[STUDENT]
            played = TrajectoryGenerator(sampler, student, playing, seed, hold, readers)
        elif config.estimator.imitation is not None:
            return Engines(self._imitating(sampler, run_id), scorer)
        else:
            return Engines(sampler, scorer)
        trajectories = ResumedTrajectories(played, self.resumed)
        return Engines(trajectories, scorer, hold, trajectories)

    def _imitating(self, sampler: RolloutGenerator, run_id: str) -> ImitatingGenerator:
        """Return what has the teachers answer their share of the prompts."""
        prepared, students = self._prepared, self._fleets[STUDENT]
        ids = StudentIds(
            prepared.student.vocab_size,
            prepared.encode,
            prepared.ending.token_ids,
            prepared.ends[STUDENT].written,
        )
        teachers = {name: self._fleets[role] for name, role in answering(self._config).items()}

        def version() -> int:
            return max((each.version or 0 for each in students.servers()), default=0)

        return ImitatingGenerator(self._config, sampler, teachers, ids, version, run_id)

    async def start_over(self, state: ControllerState) -> None:
        """Prepare for another learner. WeightSyncFailed: too few servers are left."""
        await self.weights.start_over()

    async def remove_server(self, url: str, drop: Callable[[], None]) -> str | None:
        """Let a server go between two weight syncs, as WeightSync.remove_server does."""
        return await self.weights.remove_server(url, drop)

    async def farewell(self, outliving: Collection[str]) -> None:
        """Leave the group of servers that outlive this run."""
        if outliving:
            await self.weights.close()

    async def farewell_received(self) -> None:
        """Return at once."""

    async def close(self, outliving: Collection[str]) -> None:
        """Give servers that outlive this run the memory that they shared with the learner."""
        if self._opened:
            await self.weights.restore_memory(tuple(outliving))

    def columns(self) -> Mapping[str, Any]:
        """Return what teachers cost that are paid for by the token."""
        return billed(self._config, self._fleets)

    def summary(self) -> None:
        """Return None: there are no sites."""


def _follower(
    ready: Ready, role: Role, source: TeacherSource, fleet: Fleet, lose: Lose
) -> Follower:
    """Make what sends a teacher's servers the weights of its source."""
    config, learner = as_students(ready.config, role), WeightsOfRole(ready.remote, role)
    make_transport = transport_kind(config.weight_sync).fleet_part
    transport = make_transport(fleet, learner.move_weights, config)
    return Follower(WeightSync(fleet, learner, transport, config.weight_sync, lose), source)
