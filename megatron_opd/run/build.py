"""Builds the concrete parts behind the controller's Protocols."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.config.roles import STUDENT, Role, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import (
    Guard,
    Keeper,
    Ports,
    RolloutEngine,
    TeacherScorer,
    WeightSyncer,
)
from megatron_opd.controller.progress import make_display
from megatron_opd.controller.schedule import make_schedule
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.data_workers.reward import make_reward
from megatron_opd.data_workers.through import sampled_by_workers, scored_by_workers
from megatron_opd.inputs.prepare import Prepared
from megatron_opd.inputs.sinks import make_sinks
from megatron_opd.inputs.teachers import make_teacher_watch
from megatron_opd.metrics.persist import restore_totals
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.rollouts import RolloutRecord
from megatron_opd.metrics.signal import SignalWatch
from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.rollout.generator import make_generator
from megatron_opd.rollout.scorer import make_scorer
from megatron_opd.rollout.teacher_health import HealthProbe, here
from megatron_opd.run.batch_learner import BatchLearner
from megatron_opd.run.first_update import MismatchJudge
from megatron_opd.run.resume import Resumption
from megatron_opd.sites.hub import Hub
from megatron_opd.sites.intake import Intake
from megatron_opd.transport.remote_learner import RemoteLearner
from sglang_bridge.fleet import Fleet


def make_recorder(
    config: Config,
    run_dir: RunDir,
    totals: RunTotals,
    engines: Sequence[str],
    console: Console,
    resumed: Resumption | None,
    prepared: Prepared,
    live: Callable[[int], None],
    probe: HealthProbe | None = None,
    pool: WorkerPool | None = None,
    hub: Hub | None = None,
) -> RunRecorder:
    """Make the observer: files as configured, and a display. live: told of each version."""
    metrics = config.metrics
    timeline = None
    if metrics.trace:
        timeline = Timeline(TraceWriter(run_dir.trace, time.monotonic()), engines)
    rollouts = None
    if metrics.rollouts:
        fetch = None if pool is None else pool.fetch
        rollouts = RolloutRecord(run_dir.rollouts, prepared.decode, metrics.rollouts, fetch)
    display = make_display(console) if metrics.progress else None
    curriculum = curriculum_of(prepared)
    elapsed_s, updates = 0.0, 0
    if resumed is not None:
        elapsed_s, updates = resumed.extras["elapsed_s"], resumed.state.updates
        restore_totals(totals, resumed.extras["totals"], time.monotonic())
    return RunRecorder(
        config.run.max_steps,
        totals,
        make_sinks(config, run_dir, updates),
        timeline,
        display,
        elapsed_s=elapsed_s,
        updates=updates,
        teacher_watch=make_teacher_watch(config, prepared.vocab_sizes),
        signal=SignalWatch(
            reads_groups=config.estimator.reads_groups, patience=metrics.signal_patience
        ),
        more_columns=lambda: {
            **({} if curriculum is None else curriculum.columns()),
            **({} if hub is None else hub.columns()),
        },
        rollouts=rollouts,
        live=live,
        probe=probe,
    )


def make_health_probe(
    config: Config,
    prepared: Prepared,
    fleets: Mapping[Role, Fleet],
    pool: WorkerPool | None = None,
) -> HealthProbe | None:
    """Make what measures how student and teacher agree, if metrics.health_every asks for it."""
    if not config.metrics.health_every:
        return None
    return HealthProbe(
        fleets[STUDENT],
        {name: fleets[role] for name, role in teacher_roles(config).items()},
        config.metrics,
        (config.rollout.temperature, config.scoring.temperature),
        frozenset(prepared.ending.token_ids),
        prepared.student.vocab_size,
        name=uuid.uuid4().hex[:8],
        seed=config.run.seed,
        whole=here if pool is None else pool.sample,
    )


def curriculum_of(prepared: Prepared) -> CurriculumSource | None:
    """Return the source of the prompts if it chooses them by their pass rate."""
    return prepared.prompts if isinstance(prepared.prompts, CurriculumSource) else None


def make_controller(
    config: Config,
    prepared: Prepared,
    fleets: Mapping[Role, Fleet],
    learner: RemoteLearner,
    weight_sync: WeightSyncer,
    recorder: RunRecorder,
    guard: Guard,
    keeper: Keeper,
    state: ControllerState,
    pool: WorkerPool | None = None,
    intake: Intake | None = None,
    judge: MismatchJudge | None = None,
) -> Controller:
    """Make the controller of one run, which continues from `state`.

    intake: samples and scores in place of the fleets. judge: see BatchLearner.
    """
    rollout: RolloutEngine
    teacher: TeacherScorer
    if intake is not None:
        rollout = teacher = intake
    else:
        rollout, teacher = _sampling_here(config, prepared, fleets, pool)
    ports = Ports(
        prompts=prepared.prompts,
        passed=lambda: prepared.prompts.passed,
        rollout=rollout,
        teacher=teacher,
        learner=BatchLearner(config, learner, pool, judge),
        store=pool,
        weight_sync=weight_sync,
        observer=recorder,
        guard=guard,
        curriculum=curriculum_of(prepared),
        keeper=keeper,
    )
    return Controller(make_schedule(config), ports, state)


def _sampling_here(
    config: Config, prepared: Prepared, fleets: Mapping[Role, Fleet], pool: WorkerPool | None
) -> tuple[RolloutEngine, TeacherScorer]:
    """Return what samples from the run's own fleets, and what scores there."""
    run_id = uuid.uuid4().hex[:8]
    vocab_size = prepared.student.vocab_size
    reward = make_reward(prepared.judge, prepared.ending, pool)
    sample = elsewhere = None
    if pool is not None:
        sizes = {name: prepared.vocab_sizes[role] for name, role in teacher_roles(config).items()}
        sample, elsewhere = (
            sampled_by_workers(pool, fleets[STUDENT]),
            scored_by_workers(pool, sizes),
        )
    return (
        make_generator(
            config, fleets[STUDENT], vocab_size, run_id, prepared.ending.token_ids, sample
        ),
        make_scorer(config, fleets, vocab_size, run_id, reward, elsewhere),
    )
