"""Samples on a run's own servers. SitesOfRun (sites/learner_side.py) is the other SampleSource."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_opd.config.roles import STUDENT, Role, teacher_roles
from megatron_opd.controller.ports import Guard, RolloutEngine, TeacherScorer
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data_workers.fleet_calls import sampled_by_workers, scored_by_workers
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.data_workers.reward import make_reward
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.rollout.trajectories import Playing, TrajectoryGenerator
from megatron_opd.run.stages import Ready
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
        playing: plays trajectories; None: each prompt is answered once.
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
        self._used, self._opened = ready.used(STUDENT), False
        make_transport = transport_kind(config.weight_sync).fleet_part
        transport = make_transport(student, ready.remote.move_weights, config)
        memory = MemoryTurns(student, ready.remote) if config.schedule.time_shared else None
        self.weights = WeightSync(
            student, ready.remote, transport, config.weight_sync, lose, memory
        )

    async def open(self, guard: Guard, supervisor: Supervisor) -> None:
        """Connect the learner and the servers. Raises WeightSyncFailed."""
        self._opened = True
        await self.weights.open(used=self._used)

    async def wait_ready(self, guard: Guard) -> None:
        """Return at once: the servers are there."""

    def engines(self) -> tuple[RolloutEngine, TeacherScorer]:
        """Return what samples from the student's servers, and what scores on the teachers'."""
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
        scorer = FleetScorer(config, fleets, vocab_size, run_id, reward, score)
        if self._playing is None:
            return sampler, scorer
        seed = config.run.seed
        return TrajectoryGenerator(sampler, fleets[STUDENT], self._playing, seed), scorer

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
        """Return no columns of its own."""
        return {}

    def summary(self) -> None:
        """Return None: there are no sites."""
