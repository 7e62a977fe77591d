"""Holds what belongs to one run: its processes and parts, what it resumes from, its summary."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from megatron_opd.checkpoint.claimant import claimant_of
from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.checkpoint.run_dir import RunDir, prepare_run_dir
from megatron_opd.config.roles import STUDENT, Role, section_of
from megatron_opd.config.site_bounds import staleness_bound
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.errors import kept_traceback
from megatron_opd.fleet.elastic import Elastic
from megatron_opd.fleet.ends import FirstCause
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.inputs.prepare import Prepared
from megatron_opd.inputs.prompt_order import KeptData, data_now
from megatron_opd.launch.data_workers import DataWorkers
from megatron_opd.launch.keys import role_key
from megatron_opd.launch.machines import Machines
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.stopping import Stopping
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting
from megatron_opd.run.checkpoints import Checkpoints
from megatron_opd.run.evaluations import RunEvaluations
from megatron_opd.run.first_update import NOT_JUDGED, MismatchJudge
from megatron_opd.run.recover import LearnerRestarts
from megatron_opd.run.resume import Resumption, reopen_run_dir
from megatron_opd.run.summary import written_summary
from megatron_opd.sites.learner_side import SitesOfRun
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.fleet import Fleet

NOT_STARTED = Accounting(
    updates=0, version=0, admitted=0, consumed=0, dropped={}, in_flight=0, interrupted=False
)


def say(console: Console, *lines: str) -> None:
    """Print lines for the user."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


class RunParts:
    """Serves as the base of PipelineRun: its parts, and what is told of them."""

    def __init__(
        self,
        machines: Machines,
        prepared: Prepared,
        admission: Admission,
        roles: Sequence[Role],
        console: Console,
        resumed: Resumption | None = None,
    ) -> None:
        self.resumed = resumed
        config = self.config = machines.config
        self.machines, self.prepared, self.admission = machines, prepared, admission
        self.run_dir = RunDir(config.run.dir)
        self.claimant = claimant_of("run", config.run.dir)
        self.opened = False  # whether the directory is this run's
        self.roles, self.console = tuple(roles), console
        kept = admission.keys.servers
        self.keys = {role: role_key(section_of(config, role), role, kept) for role in roles}
        self.servers = {
            role: machines.servers(role, self.run_dir.logs, key) for role, key in self.keys.items()
        }
        self.urls: dict[Role, tuple[str, ...]] = {
            role: section_of(config, role).urls or tuple(server.url for server in servers)
            for role, servers in self.servers.items()
        }
        # the first servers may be kept for evaluations
        sites = tuple(config.sites.members)
        self.samplers = sites or self.urls[STUDENT][config.evaluation.servers :]
        self.totals = RunTotals(self.samplers, config.rollout.group_size)
        sums = data_now(config) if resumed is None else resumed.begun.sums
        assert prepared.shape is not None, "a run has read its data"
        self.data = KeptData(sums, prepared.shape)
        self.began = resumed
        self.recorder: RunRecorder | None = None
        self.checkpoints: Checkpoints | None = None
        self.controller: Controller | None = None
        self.remote: RemoteLearner | None = None
        self.processes = Processes([], None)
        self.ends = FirstCause(lambda: self.processes.watched())
        self.fleets: dict[Role, Fleet] = {}
        self.evaluations = RunEvaluations(config, prepared, self.fleets, self._say)
        self.supervisor: Supervisor | None = None
        self.elastic: Elastic | None = None
        self.weight_sync: WeightSync | None = None
        self.judge: MismatchJudge | None = None
        self.sites: SitesOfRun | None = None
        self.restarts: LearnerRestarts | None = None
        self.rolled_back = 0
        self.teacher_checks: list[str] = []
        self.workers: DataWorkers | None = None
        self.stopping = Stopping(config.checkpoint.grace_s, self._say)
        self.started_s = time.monotonic()

    @property
    def _state(self) -> ControllerState:
        """Returns what the controller continues from."""
        return NOTHING_YET if self.resumed is None else self.resumed.state

    def _earlier(self, key: str, default: Any) -> Any:
        return default if self.resumed is None else self.resumed.extras[key]

    def _resumed_at(self) -> list[int]:
        if self.resumed is None:
            return []
        return [*self.resumed.extras["resumed_at_updates"], self.resumed.state.updates]

    def _changes(self) -> list[dict[str, Any]]:
        return [] if self.resumed is None else [asdict(change) for change in self.resumed.changes]

    def _open_run_dir(self) -> None:
        """Take over the directory for this run. Raises UserError."""
        if self.resumed is None:
            self.run_dir = prepare_run_dir(self.config.run.dir, self.config)
        else:
            self._say(*self.resumed.notes)
            updates, changes = self.resumed.state.updates, self.resumed.changes
            rows = self.evaluations.continue_from(self.resumed.evaluations)
            self.run_dir = reopen_run_dir(self.config, updates, changes, rows)
        self.opened = True
        write_synced(self.run_dir.template, json.dumps(self.prepared.template.as_json()))
        self.claimant.keep(self.run_dir.path)

    def _used(self, role: Role) -> bool:
        """Return whether an earlier controller of this run used the role's servers."""
        return self.resumed is not None and bool(section_of(self.config, role).urls)

    def _see_logs(self) -> str:
        return f"; logs are in {self.run_dir.logs}" if self.opened else ""

    def _keep_traceback(self, error: BaseException) -> str:
        if not self.opened:  # the logs there are an earlier run's
            traceback.print_exception(error)
            return "its traceback is above"
        return kept_traceback(error, self.run_dir.logs / "controller.log")

    # ------------------------------------------------------------ how the parts end

    async def _close_sites(self) -> None:
        if self.sites is not None:
            await self.sites.close()

    async def _restore_memory(self) -> None:
        if self.weight_sync is not None and self.elastic is not None:
            outliving = (*self.config.student.urls, *self.elastic.added)
            await self.weight_sync.restore_memory(outliving)

    async def _close_fleets(self) -> None:
        await asyncio.gather(*(fleet.close() for fleet in self.fleets.values()))

    async def _stop_workers(self) -> None:
        if self.workers is not None:
            await self.workers.stop()

    async def _abandon_checkpoint(self) -> None:
        if self.checkpoints is not None:
            await self.checkpoints.abandon()

    def _write_summary(self, status: str, cause: str | None) -> str | None:
        """Write summary.json; return None, or why it could not be written."""
        accounting = NOT_STARTED if self.controller is None else self.controller.accounting
        wall_s = time.monotonic() - self.started_s + self._earlier("wall_s", 0.0)
        summary: dict[str, Any] = {"status": status, "cause": cause}
        bound = staleness_bound(self.config)
        summary |= summarise(self.totals, accounting, wall_s, bound)
        summary |= NOT_JUDGED if self.judge is None else self.judge.summary()
        summary |= self.evaluations.summary(accounting.updates)
        summary["teacher_checks"] = self.teacher_checks
        summary["resumed_at_updates"] = self._resumed_at()
        summary["resumed_with_changes"] = self._changes()
        supervisor = self.supervisor
        summary["servers_lost"] = {} if supervisor is None else supervisor.lost
        restarted = 0 if supervisor is None else supervisor.restarted.total()
        summary["servers_restarted"] = restarted
        summary["servers_added"] = [] if self.elastic is None else self.elastic.added
        summary["servers_removed"] = [] if self.elastic is None else self.elastic.removed
        summary["learner_restarts"] = 0 if self.restarts is None else self.restarts.count
        summary["updates_rolled_back"] = self.rolled_back
        summary["samples_readmitted"] = sum(fleet.restarted for fleet in self.fleets.values())
        summary["requests_timed_out"] = sum(fleet.timed_out for fleet in self.fleets.values())
        summary["sites"] = None if self.sites is None else self.sites.summary()
        summary["data_workers_lost"] = 0 if self.workers is None else self.workers.pool.workers_lost
        learners = 0 if self.remote is None else self.remote.frames_refused
        workers = 0 if self.workers is None else self.workers.pool.links.refusals.count
        summary["frames_refused"] = learners + workers
        if self.checkpoints is not None:
            summary["checkpoint_wait_s_mean"] = self.checkpoints.waited_s.value
            summary["checkpoint_s_mean"] = self.checkpoints.written_s.value
        summary["prompts_skipped"] = self.prepared.prompts_skipped
        drawn = 0 if self.controller is None else self.controller.next_uid
        summary["data_epochs"] = self.prepared.prompts.epochs_at(drawn)
        return written_summary(self.run_dir.summary, summary, self._say)

    def _say(self, *lines: str) -> None:
        say(self.console, *lines)
