"""Makes the updates of one learner, until the last one or until that learner is lost.

First the weights of the checkpoint are in the learner and live on the servers; then observers,
evaluations, checkpoints and controller are made; then the controller makes the updates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.config.roles import STUDENT
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.garbage import freeze_objects, rare_collections
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.progress import make_display
from megatron_opd.controller.schedule import make_schedule
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.evaluation.evaluations import Evaluations, Surroundings
from megatron_opd.evaluation.progress import EvaluationProgress
from megatron_opd.evaluation.summary import summary_of
from megatron_opd.fleet.guards import while_alive
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.inputs.prompts import drawn_lines, source_at, used_up
from megatron_opd.inputs.sinks import make_sinks
from megatron_opd.inputs.teachers import make_teacher_watch
from megatron_opd.metrics.live_display import LiveDisplay
from megatron_opd.metrics.observers import Observers, RunObserver
from megatron_opd.metrics.persist import dump_totals, restore_totals
from megatron_opd.metrics.recorder import Earlier, Probe, RunRecorder
from megatron_opd.metrics.rollouts import RolloutRecord
from megatron_opd.metrics.signal import SignalWatch
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.records.types import ALONE
from megatron_opd.rollout.beside import here
from megatron_opd.rollout.hint_meter import HintProbe
from megatron_opd.rollout.teacher_health import HealthProbe
from megatron_opd.run.batch_learner import BatchLearner
from megatron_opd.run.checkpoints import Checkpoints
from megatron_opd.run.evaluations import (
    EvaluatedVersions,
    EvaluatingKeeper,
    evaluations_in,
    port_of,
)
from megatron_opd.run.first_update import OFF, MismatchJudge
from megatron_opd.run.resume import Resumption, resumed_at, resumed_figures, state_of
from megatron_opd.run.stages import Ready, Up
from megatron_opd.run.work_watch import recorded_work


@dataclass(frozen=True, slots=True)
class Beginning:
    """Says where an attempt begins.

    resumed: the checkpoint; None: before the first update. before: what was evaluated then. again:
    whether another learner was lost.
    """

    resumed: Resumption | None
    before: EvaluationProgress
    again: bool = False

    @property
    def evaluated(self) -> EvaluationProgress:
        """Returns what is known of evaluations there."""
        return self.before if self.resumed is None else self.resumed.evaluations


@dataclass(frozen=True, slots=True)
class Attempt:
    """Holds what makes the updates with one learner, and what counts, keeps and evaluates them."""

    ready: Ready
    up: Up
    beginning: Beginning
    prepared: Prepared
    totals: RunTotals
    observers: Observers
    timeline: Timeline | None
    evaluations: Evaluations
    checkpoints: Checkpoints
    judge: MismatchJudge | None
    controller: Controller

    async def run(self) -> None:
        """Make the updates that are left."""
        ready, up, controller = self.ready, self.up, self.controller
        version = state_of(self.beginning.resumed).version
        with ready.stopping.after(self._preempted):
            serve_on = up.sampling.weights.serve_on(lambda: version, asyncio.Lock())
            await while_alive(up.guard, self.evaluations.again(), beside=serve_on)
            await up.sampling.wait_ready(up.guard)
            freeze_objects()
            with rare_collections(ready.config.permits):
                async with self._work_recorded():
                    await controller.run()
            await while_alive(up.guard, self.checkpoints.finish())
        ready.say(*used_up(ready.config, controller.accounting.updates))
        ready.say(*drawn_lines(ready.config, self.prepared.train, self.prepared.heldout))

    def _preempted(self) -> None:
        """End training early, and evaluate nothing more: the run that continues does."""
        self.controller.end_early()
        self.evaluations.interrupt()

    def _work_recorded(self) -> AbstractAsyncContextManager[None]:
        if self.timeline is None:
            return nullcontext()
        return recorded_work(self.timeline, self.up.fleets, self.ready.processes)

    def figures(self) -> dict[str, Any]:
        """Return the keys of summary.json on the updates."""
        accounting, config = self.controller.accounting, self.ready.config
        return {
            **summarise(self.totals, accounting, self.ready.wall_s(), config.staleness_bound),
            **(OFF if self.judge is None else self.judge.summary()),
            **summary_of(self.evaluations, None),
            **resumed_figures(self.beginning.resumed),
            "checkpoint_wait_s_mean": self.checkpoints.waited_s.value,
            "checkpoint_s_mean": self.checkpoints.written_s.value,
            "data_epochs": self.prepared.prompts.epochs_at(self.controller.next_uid),
        }


async def begin_attempt(
    ready: Ready, up: Up, beginning: Beginning, closers: AsyncExitStack
) -> Attempt:
    """Bring learner and servers to where the attempt begins, and make its parts.

    closers: takes what ends the parts.
    """
    resumed, state = beginning.resumed, state_of(beginning.resumed)
    if resumed is not None:
        await up.sampling.weights.make_room()
        await ready.remote.load_state(resumed.learner)
    if resumed is not None or beginning.again or ready.config.weight_sync.round_to is not None:
        # the servers hold other weights: the checkpoint that the run began with, or later ones
        await up.sampling.weights.sync(state.version, ALONE)
    attempt = _made(ready, up, beginning)
    ready.summary.follow("attempt", attempt.figures)
    checkpoints, evaluations = attempt.checkpoints, attempt.evaluations
    for close in (checkpoints.abandon, attempt.observers.close, evaluations.abandon):
        closers.push_async_callback(ready.ends.closing(close))
    return attempt


def _made(ready: Ready, up: Up, beginning: Beginning) -> Attempt:
    config, resumed, state = ready.config, beginning.resumed, state_of(beginning.resumed)
    prepared = ready.prepared
    if beginning.again:
        prepared = replace(prepared, prompts=source_at(prepared.prompts, state))
    # these three tell each other what happens: each names the others where it calls them
    surroundings = Surroundings(
        port=lambda: port_of(config, prepared, STUDENT, up.fleets[STUDENT]),
        updates=lambda: controller.accounting.updates,
        elapsed_s=lambda: recorder.elapsed_s(),
        record=lambda row: observers.evaluated(row),
        end_early=lambda: controller.end_early(),
        say=ready.say,
        playing=up.playing,
    )
    evaluations = evaluations_in(config, prepared, surroundings)
    evaluations.restore(beginning.evaluated)
    recorder, timeline, observers = _observers(ready, up, prepared, beginning, evaluations)
    checkpoints = Checkpoints(
        StepDirs(ready.run_dir.checkpoints),
        config,
        ready.remote,
        lambda: _extras(ready, resumed, recorder, evaluations),
        ready.say,
        ready.admission.claim,
        state.updates,
        evaluations,
    )
    judge = _make_judge(ready)
    engines = up.sampling.engines()
    ports = Ports(
        prompts=prepared.prompts,
        passed=lambda: prepared.prompts.passed,
        rollout=engines.rollout,
        teacher=engines.teacher,
        learner=BatchLearner(config, ready.remote, up.pool, judge),
        store=up.pool,
        hold=engines.hold,
        turns=engines.turns,
        weight_sync=up.sampling.weights,
        observer=observers,
        guard=up.guard,
        curriculum=_curriculum(prepared),
        keeper=EvaluatingKeeper(checkpoints, evaluations),
    )
    controller = Controller(make_schedule(config), ports, state)
    if resumed is None and not beginning.again:
        for row in beginning.before.rows:
            observers.evaluated(row.row())
    return Attempt(
        ready=ready,
        up=up,
        beginning=beginning,
        prepared=prepared,
        totals=recorder.totals,
        observers=observers,
        timeline=timeline,
        evaluations=evaluations,
        checkpoints=checkpoints,
        judge=judge,
        controller=controller,
    )


def _make_judge(ready: Ready) -> MismatchJudge | None:
    experts, info = any(ready.prepared.student.spec.moe_layers), ready.remote.info
    gpu = info is not None and info.device != "cpu"
    return MismatchJudge.of(ready.config, ready.say, experts=experts, gpu=gpu)


def _curriculum(prepared: Prepared) -> CurriculumSource | None:
    """Return the source of the prompts if it chooses them by their pass rate."""
    return prepared.prompts if isinstance(prepared.prompts, CurriculumSource) else None


def _observers(
    ready: Ready, up: Up, prepared: Prepared, beginning: Beginning, evaluations: Evaluations
) -> tuple[RunRecorder, Timeline | None, Observers]:
    """Make what observes the run: files as configured, a display, and evaluations that begin.

    The time line comes first: it has the update that stops the run. Display and evaluations are
    told after the row was written.
    """
    config, run_dir, metrics = ready.config, ready.run_dir, ready.config.metrics
    recorder = _make_recorder(ready, up, prepared, beginning.resumed)
    timeline, found = None, list[RunObserver]()
    if metrics.trace:
        timeline = Timeline(TraceWriter(run_dir.trace, time.monotonic()), ready.samplers)
        found.append(timeline)
    if metrics.rollouts:
        fetch = None if up.pool is None else up.pool.fetch
        updates = state_of(beginning.resumed).updates
        theirs = None if prepared.other is None else prepared.other.decode
        path, most = run_dir.rollouts, metrics.rollouts
        found.append(RolloutRecord(path, prepared.decode, most, fetch, updates, theirs))
    found.append(recorder)
    if metrics.progress:
        display = make_display(ready.console)
        found.append(LiveDisplay(display, recorder, config.run.max_steps))
    return recorder, timeline, Observers([*found, EvaluatedVersions(evaluations)])


def _make_recorder(
    ready: Ready, up: Up, prepared: Prepared, resumed: Resumption | None
) -> RunRecorder:
    config, totals, curriculum = ready.config, ready.new_totals(), _curriculum(prepared)

    def more_columns() -> Mapping[str, Any]:
        chosen = {} if curriculum is None else curriculum.columns()
        return {**chosen, **up.sampling.columns()}

    earlier = Earlier()
    if resumed is not None:
        earlier = Earlier(resumed.state.updates, resumed.extras["elapsed_s"])
        restore_totals(totals, resumed.extras["totals"], time.monotonic())
    return RunRecorder(
        totals,
        make_sinks(config, ready.run_dir, earlier.updates),
        earlier=earlier,
        teacher_watch=make_teacher_watch(config, prepared.vocab_sizes),
        signal=SignalWatch(
            reads_groups=config.estimator.reads_groups, patience=config.metrics.signal_patience
        ),
        more_columns=more_columns,
        probes=_make_probes(ready, up),
    )


def _make_probes(ready: Ready, up: Up) -> list[Probe]:
    """Make what measures some batches beside the run, as metrics asks for it."""
    config, prepared = ready.config, ready.prepared
    vocab_size, whole = prepared.student.vocab_size, here if up.pool is None else up.pool.sample
    probes: list[Probe] = []
    if config.metrics.health_every:
        end_ids = frozenset(prepared.ending.token_ids)
        probes.append(HealthProbe(config, up.fleets, vocab_size, end_ids, whole))
    if config.metrics.leak_every:
        versions = up.sampling.teacher_versions()
        probes.append(HintProbe(config, up.fleets, prepared.hints, vocab_size, versions, whole))
    return probes


def _extras(
    ready: Ready,
    resumed: Resumption | None,
    recorder: RunRecorder,
    evaluations: Evaluations,
) -> dict[str, Any]:
    """Return what a resumed run needs besides learner and controller (resume.EXTRAS)."""
    now_s = time.monotonic()
    return {
        "elapsed_s": recorder.elapsed_s(),
        "wall_s": ready.wall_s(),
        "resumed_at_updates": resumed_at(resumed),
        "evaluations": evaluations.progress().as_json(),
        "totals": dump_totals(recorder.totals, now_s),
        "data": msgspec.to_builtins(ready.data),
        "template": ready.prepared.template.as_json(),
    }
