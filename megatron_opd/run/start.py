"""Starts the servers and the learner of a run, or waits for those that are started elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from megatron_opd.config.roles import STUDENT, Role, section_of
from megatron_opd.fleet.guards import watched_engines
from megatron_opd.fleet.startup import ServedModel, all_up, join_role
from megatron_opd.launch.data_workers import DataWorkers
from megatron_opd.launch.health import HealthGuard
from megatron_opd.launch.joining import StartingPart, there
from megatron_opd.launch.processes import Processes
from megatron_opd.run.parts import RunParts
from megatron_opd.transport.frames import largest_frame_bytes
from megatron_opd.transport.remote_learner import RemoteLearner
from megatron_opd.transport.samples import FRAMES
from sglang_bridge.fleet import Fleet


class RunStart(RunParts):
    """Serves as the base of PipelineRun: how everything comes up."""

    def _start(self, remote: RemoteLearner) -> None:
        run_dir, config = self.run_dir, self.config
        log, keys = run_dir.logs / "learner.log", self.admission.keys.ranks
        learner = self.machines.learner(run_dir.resolved_config, remote.address, keys, log)
        servers = [server for role in self.roles for server in self.servers[role]]
        self.processes = Processes(servers, learner)
        self._say(
            f"starting {len(servers)} SGLang servers and a learner of "
            f"{config.learner.parallel.world_size} ranks; logs in {run_dir.logs}"
        )
        if self.machines.line is not None:
            self._say(self.machines.line)
        self.processes.start()

    async def _connect(self, remote: RemoteLearner, fleets: Mapping[Role, Fleet]) -> None:
        config = self.config
        limits = [section_of(config, role).startup_timeout_s for role in self.roles]
        startup_s = max(limits, default=config.student.startup_timeout_s)
        parts = self.processes.parts(startup_s)
        parts["servers elsewhere"] = StartingPart(there(), self._elsewhere(fleets))
        await all_up(remote, startup_s, parts, self._say)
        for role in self.roles:
            if not section_of(config, role).urls:
                await self._join(role, fleets[role])

    async def _wait_for_others(self, remote: RemoteLearner, fleets: Mapping[Role, Fleet]) -> None:
        """Wait for servers and learner started elsewhere, for at most startup_timeout_s."""
        self._say(f"waiting for a learner: --controller {remote.address}")
        limits = {role: section_of(self.config, role).startup_timeout_s for role in self.roles}
        parts = {
            f"{role}.urls {' '.join(self.urls[role])}": StartingPart(
                self._join(role, fleets[role], limits[role]), self._elsewhere({role: fleets[role]})
            )
            for role in self.roles
        }
        await all_up(
            remote,
            max(limits.values(), default=self.config.student.startup_timeout_s),
            parts,
            self._say,
        )

    def _elsewhere(self, fleets: Mapping[Role, Fleet]) -> Callable[[], Awaitable[None]]:
        """Return what watches the servers of these roles that were started elsewhere."""
        ours = {server.url for server in self.processes.servers}
        return HealthGuard(engines=watched_engines(fleets, besides=ours)).watch

    async def _join(self, role: Role, fleet: Fleet, wait_s: float = 0.0) -> None:
        vocab_size, used = self.prepared.vocab_sizes[role], self._used(role)
        trained = self.prepared.student.spec if role == STUDENT else None
        model = ServedModel(vocab_size, self.prepared.ends[role], trained)
        notes = await join_role(self.config, role, fleet, model, self.claimant, wait_s, used=used)
        self._say(*(f"note: {line}" for line in notes))

    async def _start_workers(self) -> None:
        """Start the data workers, if there are to be any, and wait for them."""
        config = self.config
        if not config.workers.count:
            return
        if not self.opened:
            self._open_run_dir()
        spec = self.prepared.student.spec
        experts = sum(spec.moe_layers) * spec.experts_per_token
        largest = largest_frame_bytes(config, spec.vocab_size, experts)
        keys, logs = self.admission.keys, self.run_dir.logs
        self.workers = DataWorkers(self.machines, keys, FRAMES * largest, logs, self._say)
        self.workers.start(self.run_dir.resolved_config)
        await self.workers.ready(config.student.startup_timeout_s)
