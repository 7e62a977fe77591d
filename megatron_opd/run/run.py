"""Runs `opd run` and `opd control`: start, evaluate, train, evaluate, export, summarise, stop.

The run directory is locked from first to last. Once the directory belongs to this run, summary.json
is always written and every process that was started here is ended, whatever happens. `opd control`
takes the directory only when everything started elsewhere has joined, so a run that never began
changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from rich.console import Console

from megatron_opd.checkpoint.run_dir import hold_run_dir
from megatron_opd.checkpoint.run_lock import RunLock
from megatron_opd.config.digests import learner_digests
from megatron_opd.config.roles import STUDENT, Role, run_roles, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.controller.ports import Guard
from megatron_opd.errors import Preempted, RunFailed, UserError, checked
from megatron_opd.evaluation.best import export_best
from megatron_opd.fleet.admission import Entrance, supervise
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.fleet.commands import FleetDesk
from megatron_opd.fleet.guards import make_guard, while_alive
from megatron_opd.inputs.models import check_inputs_are_kept
from megatron_opd.inputs.prepare import Prepared, prepare
from megatron_opd.inputs.teachers import check_teachers
from megatron_opd.inputs.verifiers import judging
from megatron_opd.launch.keys import run_keys
from megatron_opd.launch.machines import machines_of
from megatron_opd.launch.servers import check_addresses
from megatron_opd.run.parts import say
from megatron_opd.run.resume import find_resumption
from megatron_opd.run.updates import RunUpdates
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.weight_sync.transport import transport_kind
from megatron_opd.wire.keys import RunKeys
from sglang_bridge import open_files
from sglang_bridge.fleet import Fleet


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
        if resumed is None:
            prepared = prepare(config)
        else:
            prepared = prepare(config, resumed.begun, resumed.template)
            resumed = replace(resumed, state=prepared.state)
        with (
            machines_of(config, roles, partial(say, console)) as machines,
            run_keys(machines.config, roles) as keys,
        ):
            check_addresses(machines.config, learner_here=machines.learner_here)
            admission = checked(lambda: _admission(machines.config, prepared, lock, keys))
            run = PipelineRun(machines, prepared, admission, roles, console, resumed)
            asyncio.run(run.main())
    return 0


def _admission(config: Config, prepared: Prepared, lock: RunLock, keys: RunKeys) -> Admission:
    """Return which learner is admitted. ValueError: the student's model cannot be read."""
    return Admission(
        keys=keys,
        digests=learner_digests(config),
        vocab_size=prepared.student.vocab_size,
        claim=lock.claim,
    )


class PipelineRun(RunUpdates):
    """Performs one run, from starting its processes to writing its summary."""

    async def main(self) -> None:
        """Perform the run; at its end summary.json is written and nothing is left running."""
        status, cause = "failed", None
        try:
            try:
                with self.stopping.heeded():
                    await self._run()
            finally:
                await self.ends.closing(self.processes.stop)()
            status = "finished"
        except BaseException as last:
            status, cause, end = self._verdict(last)
            raise end from last
        finally:
            unwritten = self._write_summary(status, cause) if self.opened else None
        if unwritten is not None:
            raise RunFailed(unwritten)

    def _verdict(self, last: BaseException) -> tuple[str, str | None, BaseException]:
        """Return status, cause and what the program ends with. last: what left the run."""
        first = self.stopping.meant(self.ends.first or last)
        if isinstance(first, KeyboardInterrupt):
            return "interrupted", None, first
        if not isinstance(first, Exception):
            return ("preempted" if isinstance(first, Preempted) else "failed"), str(first), first
        where = f" (run.dir {self.run_dir.path})" if isinstance(first, OSError) else ""
        told = self.ends.failure(first, self._see_logs(), self._keep_traceback, where)
        return "failed", *told

    async def _run(self) -> None:
        try:
            remote = self.remote = RemoteLearner(self.config, self.admission)
        except ValueError as error:
            raise UserError(str(error)) from None
        async with AsyncExitStack() as closers:
            for close in reversed(self._closers(remote)):  # the last one pushed is the first called
                closers.push_async_callback(self.ends.closing(close))
            await self.ends.of(self._perform(remote))
            await self.ends.closing(remote.stop)()

    def _closers(self, remote: RemoteLearner) -> list[Callable[[], Awaitable[object]]]:
        """Return what ends the parts of the run but its processes, in order."""

        async def leave() -> None:
            remote.close()

        closers = (
            *(self.evaluations.close, self._close_sites, self._restore_memory),
            *(self._close_fleets, leave, self._stop_workers, self._abandon_checkpoint),
        )
        return list(closers)

    async def _perform(self, remote: RemoteLearner) -> None:
        config, fleets = self.config, self.fleets
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
        entrance = Entrance(config, self.prepared, fleets, self.claimant, self.keys)
        supervisor, self.elastic = supervise(
            *(config, fleets, self.processes, entrance, lambda: self.weight_sync, self._say)
        )
        self.supervisor = supervisor
        async with judging(self.prepared.judge), supervisor.watching():
            guard = make_guard(self.processes, lambda: self.totals, remote, supervisor)
            await self.ends.of(self._evaluate_and_train(remote, fleets, guard))

    async def _evaluate_and_train(
        self, remote: RemoteLearner, fleets: Mapping[Role, Fleet], guard: Guard
    ) -> None:
        config = self.config
        if all(role in fleets for role in teacher_roles(config).values()):
            asked = {name: fleets[role].clients for name, role in teacher_roles(config).items()}
            checks = check_teachers(config, self.prepared, asked)
            self.teacher_checks = await while_alive(guard, checks)
            self._say(*self.teacher_checks)
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
            template = self.prepared.template.exported
            await remote.export_hf(self.run_dir.final_checkpoint, chat_template=template)
            self._say(f"checkpoint: {self.run_dir.final_checkpoint}")
            if config.checkpoint.keep_best:
                self._say(await export_best(config, self.run_dir, self.evaluations.run))
        if self.sites is not None:
            await self.sites.heard()

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
