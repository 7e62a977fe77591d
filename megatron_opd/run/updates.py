"""Makes the updates of a run, from its last checkpoint again whenever the learner was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.config.site_bounds import permits
from megatron_opd.controller.garbage import collected_rarely, put_aside
from megatron_opd.controller.ports import Guard
from megatron_opd.controller.snapshot import NOTHING_YET
from megatron_opd.fleet.guards import while_alive
from megatron_opd.inputs.prompts import source_at, used_up
from megatron_opd.metrics.persist import dump_totals
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.run.build import make_controller, make_health_probe, make_recorder
from megatron_opd.run.checkpoints import Checkpoints
from megatron_opd.run.first_update import MismatchJudge
from megatron_opd.run.recover import LearnerRestarts, last_checkpoint, through_losses
from megatron_opd.run.resume import Resumption
from megatron_opd.run.start import RunStart
from megatron_opd.run.work_watch import recorded_work
from megatron_opd.sites.learner_side import SitesOfRun
from megatron_opd.sites.versions import SiteVersions
from megatron_opd.transport.remote_learner import RemoteLearner
from megatron_opd.weight_sync.memory import MemoryTurns
from megatron_opd.weight_sync.session import WeightSync
from megatron_opd.weight_sync.transport import transport_kind
from sglang_bridge.errors import one_line
from sglang_bridge.fleet import Fleet


class RunUpdates(RunStart):
    """Serves as the base of PipelineRun: how its updates are made."""

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
            self._roll_back(last_checkpoint(self.config, wall_s, self.began))
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
            self._new_judge(remote),
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
        self._say(*self.prepared.drawn_lines(config))

    def _new_judge(self, remote: RemoteLearner) -> MismatchJudge:
        """Return what judges the first update from here on."""
        assert remote.info is not None, "the learner is up"
        experts, gpu = any(self.prepared.student.spec.moe_layers), remote.info.device != "cpu"
        self.judge = MismatchJudge(self.config, self._say, experts=experts, gpu=gpu)
        return self.judge

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
            "data": msgspec.to_builtins(self.data),
            "template": self.prepared.template.as_json(),
        }
