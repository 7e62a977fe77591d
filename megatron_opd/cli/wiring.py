"""Builds the concrete parts behind the controller's Protocols."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from megatron_opd.batching.shares import shares
from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.buffer.spread import GroupRule
from megatron_opd.cli.first_update import MismatchJudge
from megatron_opd.cli.guards import RunGuard
from megatron_opd.cli.prepare import Prepared
from megatron_opd.cli.processes import Processes
from megatron_opd.cli.resume import Resumption
from megatron_opd.cli.roles import STUDENT, Role, teacher_roles
from megatron_opd.cli.run_dir import RunDir
from megatron_opd.cli.sinks import make_sinks
from megatron_opd.cli.supervisor import Supervisor
from megatron_opd.cli.teacher_guard import make_teacher_watch
from megatron_opd.config.schema import Config
from megatron_opd.config.selection import RewardSpread
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.site_bounds import is_open, slots_by_site
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.health import HealthGuard, WatchedEngine
from megatron_opd.controller.ports import (
    Guard,
    Keeper,
    Ports,
    RolloutEngine,
    TeacherScorer,
    WeightSyncer,
)
from megatron_opd.controller.progress import make_display
from megatron_opd.controller.schedule import Afar, Schedule
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.judge import Judge
from megatron_opd.delays import batch_plan
from megatron_opd.metrics.mismatch_limits import Bound, ModelsDiffer
from megatron_opd.metrics.persist import restore_totals
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.rollouts import RolloutRecord
from megatron_opd.metrics.signal import SignalWatch
from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.rollout.generator import RolloutFleet, RolloutGenerator, Sampler
from megatron_opd.sites.hub import Hub
from megatron_opd.sites.intake import Intake
from megatron_opd.teacher.health import HealthProbe, here
from megatron_opd.teacher.overlong import Length, judged_length
from megatron_opd.teacher.scorer import Elsewhere, FleetScorer, Reward
from megatron_opd.transport.messages import UpdateMetrics
from megatron_opd.transport.samples import EncodedSample, counted_draws
from megatron_opd.transport.zmq import RemoteLearner
from megatron_opd.types import AnyRollout, AnySample, Batch, HeldRollout, HeldSample
from megatron_opd.workers.pool import WorkerPool, WorkersUnreachable
from megatron_opd.workers.through import sampled_by_workers, scored_by_workers
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet

ASK_AGAIN_S = 2.0
"""Ranks that could not take samples are asked again so long after; a worker that is lost is known
to be so after a few of these (heartbeats)."""
UNREACHABLE_S = 60.0
"""A run ends if its ranks cannot take samples for so long from workers that are there."""


def make_client(section: ServerConfig, url: str, api_key: str | None = None) -> ServerClient:
    """Make a client for a server of a role."""
    return ServerClient(url, timeout_s=section.request_timeout_s, api_key=api_key)


def make_fleet(
    section: ServerConfig, urls: Sequence[str], api_key: str | None = None, evaluators: int = 0
) -> Fleet:
    """Make clients for a role's servers. evaluators: of them are kept for evaluations."""
    return Fleet([make_client(section, url, api_key) for url in urls], evaluators)


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


def watched_engines(
    fleets: Mapping[Role, Fleet], besides: Container[str] = ()
) -> list[WatchedEngine]:
    """Return all servers, as they are watched by asking. besides: urls of those that are not."""
    return [
        WatchedEngine(f"{role} server {client.url}", client.alive)
        for role, fleet in fleets.items()
        for client in fleet.clients
        if client.url not in besides
    ]


def make_guard(
    processes: Processes,
    totals: Callable[[], RunTotals],
    learner: RemoteLearner,
    servers: Supervisor,
) -> RunGuard:
    """Watch the learner by its process and its socket; the servers are the supervisor's."""

    def health() -> HealthGuard:
        return HealthGuard(processes.watched_learner(), on_tick=totals().memory.sample)

    return RunGuard(health, learner, servers)


def make_reward(
    judge: Judge | None, ending: Ending, pool: WorkerPool | None = None
) -> Reward | None:
    """Turn the judge into what the scorer asks for the reward of a rollout.

    ending: what ends the run's responses. pool: whose judges give the rewards of what data workers
    hold.
    """
    if judge is None:
        return None

    async def reward(rollout: AnyRollout) -> float | None:
        prompt = rollout.prompt
        if not isinstance(rollout, HeldRollout):
            ids = rollout.response_ids_T.tolist()
            return await judge.reward(prompt, ids, ending.beside(prompt.stop))
        assert pool is not None, "a data worker holds the rollout"
        if prompt.answer is None or not judge.rewards(prompt):
            return None
        return await pool.judge(rollout, prompt.task, prompt.answer)

    return reward


@dataclass(frozen=True, slots=True)
class BatchLearner:
    """Acts as the controller's learner: cuts a batch into shares and sends them.

    pool: tells where ranks take the samples that data workers hold. judge: of the mismatch of the
    first update; None: nobody judges it.
    """

    config: Config
    remote: RemoteLearner
    pool: WorkerPool | None = None
    judge: MismatchJudge | None = None

    def prepare(self, sample: AnySample) -> AnySample:
        """Encode a scored sample, unless a data worker does. ValueError: it is malformed."""
        if isinstance(sample, HeldSample):
            return sample
        return EncodedSample.of(sample, counted_draws(self.config.estimator.support))

    async def train(self, batch: Batch) -> UpdateMetrics:
        """Make one update. SamplesLost. ValueError: the batch cannot be split into shares.

        UserError: learner and servers are not the same model.
        """
        judge = self.judge
        if judge is None:
            return await self._update(batch, None)
        try:
            metrics = await self._update(batch, judge.bound)
        except ModelsDiffer as error:
            raise judge.refusal(batch.update, error.gap) from None
        judge.see(batch.update, metrics)
        return metrics

    async def _update(self, batch: Batch, bound: Bound | None) -> UpdateMetrics:
        """Make one update, or raise ModelsDiffer.

        Ranks that cannot take samples of workers that are there are asked again, for
        UNREACHABLE_S; then WorkersUnreachable.
        """
        config, pool = self.config, self.pool
        batch = replace(batch, samples=tuple(map(self.prepare, batch.samples)))
        parts = shares(batch, config.learner, config.estimator, config.rollout.group_size)
        held = [sample for sample in batch.samples if isinstance(sample, HeldSample)]
        if pool is None or not held:
            return await self.remote.train(parts, bound=bound)
        clock, first_s = asyncio.get_running_loop().time, None
        while True:
            sources = {sample.rollout.prompt.uid: pool.source(sample) for sample in held}
            metrics = await self.remote.train_held(parts, sources, bound)
            if metrics is not None:
                return metrics
            first_s = clock() if first_s is None else first_s
            if await pool.loses_one_of(held, ASK_AGAIN_S):
                raise SamplesLost(f"update {batch.update}: a data worker was lost")
            if clock() - first_s >= UNREACHABLE_S:
                workers = sorted({sample.rollout.worker for sample in held})
                raise WorkersUnreachable(
                    f"the learner's ranks could not take all samples of {', '.join(workers)} for "
                    f"{UNREACHABLE_S:g} s; the learner's log says from whom, and why"
                )


def make_generator(
    config: Config,
    fleet: RolloutFleet,
    vocab_size: int,
    run_id: str,
    end_ids: tuple[int, ...],
    sample: Sampler | None = None,
) -> RolloutGenerator:
    """Make what samples rollouts from `fleet`. end_ids: the ids that end a response."""
    return RolloutGenerator(
        fleet,
        config.rollout,
        config.estimator.support,
        vocab_size,
        run_id,
        stop_token_ids=end_ids,
        routed_experts=config.learner.replays_experts,
        routed_gates=config.learner.replays_gates,
        seed=config.run.seed,
        sample=sample,
    )


def make_schedule(config: Config) -> Schedule:
    """Make the schedule of a whole run."""
    groups, by_site = config.selection.groups, slots_by_site(config)
    group_size = config.rollout.group_size if config.estimator.reads_groups else 1
    slots = sum(by_site.values())
    # all slots are full while at every site members of a group wait for some
    asked_for = slots + len(by_site) * group_size
    window = config.sites.max_staleness if is_open(config) else None
    spread = groups if isinstance(groups, RewardSpread) else None
    return Schedule(
        updates=config.run.max_steps,
        batch_size=config.buffer.batch_size,
        kind=config.schedule,
        rollout_slots=asked_for or config.rollout.concurrency,
        score_slots=config.scoring.concurrency,
        group_size=group_size,
        groups=None if spread is None else GroupRule(spread, config.estimator.distils),
        plan=batch_plan(config.schedule, config.run.seed, config.run.max_steps),
        afar=Afar(slots, window) if slots else None,
    )


def make_scorer(
    config: Config,
    fleets: Mapping[Role, Fleet],
    vocab_size: int,
    run_id: str,
    reward: Reward | None,
    elsewhere: Elsewhere | None = None,
) -> FleetScorer:
    """Make what scores rollouts on the teachers' fleets."""
    return FleetScorer(
        {name: fleets[role] for name, role in teacher_roles(config).items()},
        config.estimator,
        vocab_size,
        config.scoring,
        run_id,
        reward=reward,
        seed=config.run.seed,
        lengths=make_lengths(config),
        elsewhere=elsewhere,
    )


def make_lengths(config: Config) -> Callable[[AnyRollout], Length]:
    """Make what judges the length of a response."""
    overlong, limit = config.selection.overlong, config.rollout.max_new_tokens

    def length(rollout: AnyRollout) -> Length:
        return judged_length(overlong, rollout, rollout.prompt.max_new_tokens or limit)

    return length


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
