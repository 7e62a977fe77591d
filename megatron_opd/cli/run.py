"""Runs `opd run` and `opd control`: start, evaluate, train, evaluate, export, summarise, stop.

The run directory is locked from first to last. Once the directory belongs to this run, summary.json
is always written and every process that was started here is ended, whatever happens. `opd control`
takes the directory only when everything started elsewhere has joined, so a run that never began
changes nothing.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rich.console import Console

from megatron_opd.checkpoint.run_lock import RunLock
from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.cli.best import export_best
from megatron_opd.cli.checkpoints import CheckpointFailed, Checkpoints
from megatron_opd.cli.data_workers import DataWorkers
from megatron_opd.cli.elastic import Elastic
from megatron_opd.cli.entrance import Entrance, supervise
from megatron_opd.cli.errors import Preempted, RunFailed, UserError, kept_traceback
from megatron_opd.cli.evaluations import RunEvaluations
from megatron_opd.cli.fleet_desk import FleetDesk
from megatron_opd.cli.guards import PartGone, while_alive
from megatron_opd.cli.joining import Part, there
from megatron_opd.cli.keys import role_key, run_keys
from megatron_opd.cli.learner_restart import LearnerRestarts, last_checkpoint, through_losses
from megatron_opd.cli.machines import Machines, machines_of
from megatron_opd.cli.preflight import check_addresses, check_inputs_are_kept
from megatron_opd.cli.prepare import Prepared, checked, prepare
from megatron_opd.cli.processes import Processes
from megatron_opd.cli.resume import Resumption, find_resumption, reopen_run_dir
from megatron_opd.cli.roles import STUDENT, Role, run_roles, section_of, teacher_roles
from megatron_opd.cli.run_dir import RunDir, hold_run_dir, prepare_run_dir
from megatron_opd.cli.run_summary import written_summary
from megatron_opd.cli.sites_run import SitesOfRun
from megatron_opd.cli.startup import all_up, join_role
from megatron_opd.cli.stopping import Stopping
from megatron_opd.cli.supervisor import Supervisor
from megatron_opd.cli.teacher_guard import check_teachers
from megatron_opd.cli.train_data import source_at, used_up
from megatron_opd.cli.verifiers import judging
from megatron_opd.cli.wiring import (
    make_controller,
    make_fleet,
    make_guard,
    make_health_probe,
    make_recorder,
    watched_engines,
)
from megatron_opd.cli.work_watch import recorded_work
from megatron_opd.config.digests import learner_digests
from megatron_opd.config.schema import Config
from megatron_opd.config.site_bounds import permits, staleness_bound
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.garbage import collected_rarely, put_aside
from megatron_opd.controller.health import EngineLost, HealthGuard, ProcessDied
from megatron_opd.controller.ports import Guard
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.data.files import data_crc32
from megatron_opd.metrics.persist import dump_totals
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting
from megatron_opd.sites.versions import SiteVersions
from megatron_opd.transport.frames import largest_frame_bytes
from megatron_opd.transport.keys import RunKeys
from megatron_opd.transport.samples import FRAMES
from megatron_opd.transport.zmq import Admission, LearnerError, RemoteLearner
from megatron_opd.weight_sync.memory import MemoryTurns
from megatron_opd.weight_sync.session import WeightSync
from megatron_opd.weight_sync.transport import transport_kind
from sglang_bridge import open_files
from sglang_bridge.errors import BridgeError, one_line
from sglang_bridge.fleet import Fleet

NOT_STARTED = Accounting(
    updates=0, version=0, admitted=0, consumed=0, dropped={}, in_flight=0, interrupted=False
)


def run_pipeline(
    config: Config,
    *,
    overwrite: bool,
    resume: bool = False,
    accepted: Sequence[str] = (),
) -> int:
    """Run once, on the machines that config.cluster names.

    resume: continue from the newest checkpoint in run.dir; accepted: keys that may differ from its.

    Raises UserError for bad input, RunFailed when a started run cannot continue, KeyboardInterrupt
    after a clean stop by a signal.
    """
    open_files.raise_limit()
    check_inputs_are_kept(config)
    checked(lambda: transport_kind(config.weight_sync))
    roles, console = run_roles(config), Console(highlight=False)
    with hold_run_dir(config.run.dir, resume=resume, overwrite=overwrite) as lock:
        resumed = find_resumption(config, accepted) if resume else None
        prepared = prepare(config, NOTHING_YET if resumed is None else resumed.state)
        with (
            machines_of(config, roles, partial(say, console)) as machines,
            run_keys(machines.config, roles) as keys,
        ):
            check_addresses(machines.config, learner_here=machines.learner_here)
            admission = checked(lambda: _admission(machines.config, prepared, lock, keys))
            run = PipelineRun(machines, prepared, admission, roles, console, resumed)
            asyncio.run(run.main())
    return 0


def say(console: Console, *lines: str) -> None:
    """Print lines for the user."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _admission(config: Config, prepared: Prepared, lock: RunLock, keys: RunKeys) -> Admission:
    """Return which learner is admitted. ValueError: the student's model cannot be read."""
    return Admission(
        keys=keys,
        digests=learner_digests(config),
        vocab_size=prepared.student.vocab_size,
        claim=lock.claim,
    )


class PipelineRun:
    """Performs one run, from starting its processes to writing its summary."""

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
        self.train_crc32 = data_crc32(file.path for file in config.data.train)
        self.recorder: RunRecorder | None = None
        self.checkpoints: Checkpoints | None = None
        self.controller: Controller | None = None
        self.remote: RemoteLearner | None = None
        self.processes = Processes([], None)
        self.fleets: dict[Role, Fleet] = {}
        self.evaluations = RunEvaluations(config, prepared, self.fleets, self._say)
        self.supervisor: Supervisor | None = None
        self.elastic: Elastic | None = None
        self.weight_sync: WeightSync | None = None
        self.sites: SitesOfRun | None = None
        self.restarts: LearnerRestarts | None = None
        self.rolled_back = 0
        self.workers: DataWorkers | None = None
        self.stopping = Stopping(config.checkpoint.grace_s, self._say)
        self.started_s = time.monotonic()

    async def main(self) -> None:
        """Perform the run; at its end summary.json is written and nothing is left running."""
        status, cause = "failed", None
        try:
            with self.stopping.heeded():
                await self._run()
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except Preempted as preempted:
            status, cause = "preempted", str(preempted)
            raise
        except UserError as error:
            cause = str(error)
            raise
        except (BridgeError, LearnerError) as error:
            cause = await self.processes.explain(error)
            raise RunFailed(f"{cause}{self._see_logs()}") from error
        except (LoopFailed, CheckpointFailed, PartGone, ProcessDied, EngineLost) as error:
            cause = one_line(str(error))
            raise RunFailed(f"{cause}{self._see_logs()}") from error
        except Exception as error:
            # an unforeseen error: one line for the user, its traceback beside the other logs
            where = f" (run.dir {self.run_dir.path})" if isinstance(error, OSError) else ""
            cause = one_line(f"{type(error).__name__}: {error}{where}")
            raise RunFailed(f"{cause}; {self._keep_traceback()}") from error
        finally:
            if self.checkpoints is not None:
                await self.checkpoints.abandon()
            await self.processes.stop()
            unwritten = self._write_summary(status, cause) if self.opened else None
        if unwritten is not None:
            raise RunFailed(unwritten)

    async def _run(self) -> None:
        config = self.config
        try:
            remote = self.remote = RemoteLearner(config, self.admission)
        except ValueError as error:
            raise UserError(str(error)) from None
        fleets = self.fleets
        try:
            for role in self.roles:
                section = section_of(config, role)
                evaluators = config.evaluation.servers if role == STUDENT else 0
                fleets[role] = make_fleet(section, self.urls[role], self.keys[role], evaluators)
            self._say(*(f"note: {line}" for line in self.prepared.notes))
            if self.machines.starts:
                for role in self.roles:
                    if section_of(config, role).urls:  # checked before anything is started
                        await self._join(role, fleets[role])
                self._open_run_dir()
                self._start(remote)
                await self._connect(remote, fleets)
            else:
                await self._wait_for_others(remote, fleets)
            await self._start_workers()
            self._say(f"everything is up after {time.monotonic() - self.started_s:.0f} s")
            entrance = Entrance(config, self.prepared, fleets, self.keys)
            supervisor, self.elastic = supervise(
                *(config, fleets, self.processes, entrance, lambda: self.weight_sync, self._say)
            )
            self.supervisor = supervisor
            async with judging(self.prepared.judge), supervisor.watching():
                guard = make_guard(self.processes, lambda: self.totals, remote, supervisor)
                await self._evaluate_and_train(remote, fleets, guard)
            await remote.stop()
        finally:
            await self.evaluations.close()
            if self.sites is not None:
                await self.sites.close()
            if self.weight_sync is not None and self.elastic is not None:
                outliving = (*config.student.urls, *self.elastic.added)
                await self.weight_sync.restore_memory(outliving)
            await asyncio.gather(*(fleet.close() for fleet in fleets.values()))
            remote.close()
            if self.workers is not None:
                await self.workers.stop()

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

    async def _evaluate_and_train(
        self, remote: RemoteLearner, fleets: Mapping[Role, Fleet], guard: Guard
    ) -> None:
        config = self.config
        if all(role in fleets for role in teacher_roles(config).values()):
            asked = {name: fleets[role].clients for name, role in teacher_roles(config).items()}
            checks = check_teachers(config, self.prepared, asked)
            self._say(*await while_alive(guard, checks))
        if not self.opened:
            self._open_run_dir()
        if self.resumed is None and not config.sites.members:
            before = self.evaluations.before(teacher_roles(config))
            self._say(*await while_alive(guard, before))
        assert self.supervisor is not None
        assert self.elastic is not None
        file = config.cluster.fleet_file
        desk = FleetDesk(self.run_dir.path, self.elastic, file, self._say)
        self.supervisor.start(desk.serve())
        if config.sites.members:
            await self._train_afar(remote, fleets, guard)
        else:
            await self._train_and_evaluate(remote, fleets, guard)
        if self.checkpoints is not None and config.checkpoint.keep_best:
            await self.checkpoints.rotate()  # the best one is known only now
        if config.checkpoint.export_hf:
            await remote.export_hf(self.run_dir.final_checkpoint)
            self._say(f"checkpoint: {self.run_dir.final_checkpoint}")
            if config.checkpoint.keep_best:
                self._say(await export_best(config, self.run_dir, self.evaluations.run))

    async def _train_and_evaluate(
        self, remote: RemoteLearner, fleets: Mapping[Role, Fleet], guard: Guard
    ) -> None:
        """Make all updates, and evaluate the last weights."""
        weight_sync = await self._train(remote, fleets, guard)
        assert self.controller is not None
        assert self.elastic is not None
        version = self.controller.accounting.version
        serve_on = weight_sync.serve_on(lambda: version, asyncio.Lock())
        after = self.evaluations.after(version)
        self._say(*await while_alive(guard, after, beside=serve_on))
        if self.config.student.urls or self.elastic.added:
            await weight_sync.close()  # servers that outlive this run leave its group

    async def _train_afar(
        self, remote: RemoteLearner, fleets: Mapping[Role, Fleet], guard: Guard
    ) -> None:
        """Make all updates on what sampler sites send."""
        sites = SitesOfRun(self.config, self.prepared, remote, fleets, self._state, self._say)
        self.sites = sites
        await while_alive(guard, sites.versions.open())
        assert self.supervisor is not None
        self.supervisor.start(sites.hub.serve())
        attempt = partial(self._attempt, remote, fleets, guard, sites.versions)
        await self._through_losses(remote, attempt, lambda: sites.start_over(self._state))
        await sites.farewell()

    async def _train(
        self, remote: RemoteLearner, fleets: Mapping[Role, Fleet], guard: Guard
    ) -> WeightSync:
        """Make all updates on what the run's own servers sample."""
        config, student = self.config, fleets[STUDENT]
        make_transport = transport_kind(config.weight_sync).fleet_part
        transport = make_transport(student, remote.move_weights, config)
        assert self.supervisor is not None
        lose = self.supervisor.lose
        memory = MemoryTurns(student, remote) if config.schedule.time_shared else None
        weight_sync = WeightSync(student, remote, transport, config.weight_sync, lose, memory)
        self.weight_sync = weight_sync
        await weight_sync.open(used=self._used(STUDENT))
        attempt = partial(self._attempt, remote, fleets, guard, weight_sync)
        await self._through_losses(remote, attempt, weight_sync.start_over)
        return weight_sync

    async def _through_losses(
        self,
        remote: RemoteLearner,
        attempt: Callable[[], Awaitable[None]],
        start_over: Callable[[], Awaitable[None]],
    ) -> None:
        """Make all updates, from the last checkpoint again whenever the learner was lost.

        start_over: prepares the way of the weights, and the sites, for another learner.
        """
        restarts = LearnerRestarts(self.config, remote, self.processes, self._say)
        self.restarts, wall_s = restarts, self._earlier("wall_s", 0.0)

        async def recover() -> None:
            await restarts.again()
            self._roll_back(last_checkpoint(self.config, wall_s))
            await start_over()

        async def lost(error: Exception) -> bool:
            if not await restarts.possible():
                return False
            self._say(f"the learner is lost and started again: {one_line(str(error))}")
            if self.checkpoints is not None:
                await self.checkpoints.abandon()
            await self.evaluations.close()
            return True

        await through_losses(attempt, recover, lost)

    @property
    def _state(self) -> ControllerState:
        """Returns what the controller continues from."""
        return NOTHING_YET if self.resumed is None else self.resumed.state

    def _roll_back(self, resumed: Resumption | None) -> None:
        """Continue from there, as if nothing had been done since."""
        state = NOTHING_YET if resumed is None else resumed.state
        updates = state.updates
        if self.controller is not None:
            self.rolled_back += self.controller.accounting.updates - updates
            self.controller = None
        self._say(f"the learner is up, and continues from update {updates}")
        self.resumed = resumed
        self.totals = RunTotals(self.samplers, self.config.rollout.group_size)
        prompts = source_at(self.prepared.prompts, state)
        self.prepared = replace(self.prepared, prompts=prompts)
        kept = None if resumed is None else resumed.evaluations
        self.run_dir.rewind(updates, self.evaluations.continue_from(kept))

    async def _attempt(
        self,
        remote: RemoteLearner,
        fleets: Mapping[Role, Fleet],
        guard: Guard,
        weight_sync: WeightSync | SiteVersions,
    ) -> None:
        """Make the updates that are left, with one learner."""
        config, resumed, state = self.config, self.resumed, self._state
        if resumed is not None:
            await weight_sync.make_room()
            await remote.load_state(resumed.learner)
        assert self.restarts is not None
        if resumed is not None or self.restarts.count or config.weight_sync.round_to is not None:
            # the servers hold other weights: the checkpoint that the run began with, or later ones
            await weight_sync.sync(state.version)
        pool = None if self.workers is None else self.workers.pool
        recorder = self.recorder = make_recorder(
            config,
            self.run_dir,
            self.totals,
            self.samplers,
            self.console,
            resumed,
            self.prepared,
            self.evaluations.run.live,
            make_health_probe(config, self.prepared, fleets, pool),
            pool,
            None if self.sites is None else self.sites.hub,
        )
        dirs, claim = StepDirs(self.run_dir.checkpoints), self.admission.claim
        kept = self.checkpoints = Checkpoints(
            *(dirs, config, remote, self._extras, self._say, claim, state.updates),
            evaluations=self.evaluations.run,
        )
        keeper = self.evaluations.keeper(kept)
        self.controller = make_controller(
            config,
            self.prepared,
            fleets,
            remote,
            weight_sync,
            recorder,
            guard,
            keeper,
            state,
            pool,
            None if self.sites is None else self.sites.hub.intake,
        )
        self.evaluations.connect(recorder, self.controller)
        with self.stopping.after(self.evaluations.preempted):
            serve_on = weight_sync.serve_on(lambda: state.version, asyncio.Lock())
            await while_alive(guard, self.evaluations.run.again(), beside=serve_on)
            if self.sites is not None:
                await while_alive(guard, self.sites.first())
            put_aside()
            with collected_rarely(permits(config)):
                async with self._recording(recorder, fleets):
                    await self.controller.run()
            await while_alive(guard, kept.finish())
        self._say(*used_up(config, self.controller.accounting.updates))

    def _recording(
        self, recorder: RunRecorder, fleets: Mapping[Role, Fleet]
    ) -> AbstractAsyncContextManager[None]:
        if not self.config.metrics.trace:
            return nullcontext()
        return recorded_work(recorder, fleets, self.processes)

    def _extras(self) -> dict[str, Any]:
        """Return what a resumed run needs besides learner and controller."""
        assert self.recorder is not None
        now_s = time.monotonic()
        return {
            "elapsed_s": now_s - self.recorder.started_s,
            "wall_s": now_s - self.started_s + self._earlier("wall_s", 0.0),
            "resumed_at_updates": self._resumed_at(),
            "evaluations": self.evaluations.run.progress().as_json(),
            "totals": dump_totals(self.totals, now_s),
            "train_crc32": self.train_crc32,
        }

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

    async def _wait_for_others(self, remote: RemoteLearner, fleets: Mapping[Role, Fleet]) -> None:
        """Wait for servers and learner started elsewhere, for at most startup_timeout_s."""
        self._say(f"waiting for a learner: --controller {remote.address}")
        limits = {role: section_of(self.config, role).startup_timeout_s for role in self.roles}
        parts = {
            f"{role}.urls {' '.join(self.urls[role])}": Part(
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
        parts["servers elsewhere"] = Part(there(), self._elsewhere(fleets))
        await all_up(remote, startup_s, parts, self._say)
        for role in self.roles:
            if not section_of(config, role).urls:
                await self._join(role, fleets[role])

    def _elsewhere(self, fleets: Mapping[Role, Fleet]) -> Callable[[], Awaitable[None]]:
        """Return what watches the servers of these roles that were started elsewhere."""
        ours = {server.url for server in self.processes.servers}
        return HealthGuard(engines=watched_engines(fleets, besides=ours)).watch

    async def _join(self, role: Role, fleet: Fleet, wait_s: float = 0.0) -> None:
        vocab_size, used = self.prepared.vocab_sizes[role], self._used(role)
        await join_role(self.config, role, fleet, vocab_size, wait_s, used=used)

    def _used(self, role: Role) -> bool:
        """Return whether an earlier controller of this run used the role's servers."""
        return self.resumed is not None and bool(section_of(self.config, role).urls)

    def _see_logs(self) -> str:
        return f"; logs are in {self.run_dir.logs}" if self.opened else ""

    def _keep_traceback(self) -> str:
        if not self.opened:  # the logs there are an earlier run's
            traceback.print_exc()
            return "its traceback is above"
        return kept_traceback(self.run_dir.logs / "controller.log")

    def _write_summary(self, status: str, cause: str | None) -> str | None:
        """Write summary.json; return None, or why it could not be written."""
        accounting = NOT_STARTED if self.controller is None else self.controller.accounting
        wall_s = time.monotonic() - self.started_s + self._earlier("wall_s", 0.0)
        summary: dict[str, Any] = {"status": status, "cause": cause}
        bound = staleness_bound(self.config)
        summary |= summarise(self.totals, accounting, wall_s, bound)
        summary |= self.evaluations.summary(accounting.updates)
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
