"""Builds the concrete parts behind the controller's Protocols."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from megatron_opd.batching.shares import shares
from megatron_opd.buffer.spread import GroupRule
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
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.health import HealthGuard, WatchedEngine
from megatron_opd.controller.ports import Guard, Keeper, Ports, WeightSyncer
from megatron_opd.controller.progress import make_display
from megatron_opd.controller.schedule import Schedule
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.data.judge import Judge
from megatron_opd.metrics.persist import restore_totals
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.rollouts import RolloutRecord
from megatron_opd.metrics.signal import SignalWatch
from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.rollout.generator import RolloutFleet, RolloutGenerator
from megatron_opd.teacher.health import HealthProbe
from megatron_opd.teacher.overlong import Length, judged_length
from megatron_opd.teacher.scorer import FleetScorer, Reward
from megatron_opd.transport.messages import UpdateMetrics
from megatron_opd.transport.samples import EncodedSample
from megatron_opd.transport.zmq import RemoteLearner
from megatron_opd.types import Batch, Rollout, Sample
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet


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
) -> RunRecorder:
    """Make the observer: files as configured, and a display. live: told of each version."""
    metrics = config.metrics
    timeline = None
    if metrics.trace:
        timeline = Timeline(TraceWriter(run_dir.trace, time.monotonic()), engines)
    rollouts = None
    if metrics.rollouts:
        rollouts = RolloutRecord(run_dir.rollouts, prepared.decode, metrics.rollouts)
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
        more_columns=None if curriculum is None else curriculum.columns,
        rollouts=rollouts,
        live=live,
        probe=probe,
    )


def make_health_probe(
    config: Config, prepared: Prepared, fleets: Mapping[Role, Fleet]
) -> HealthProbe | None:
    """Make what measures how student and teacher agree, if metrics.health_every asks for it."""
    if not config.metrics.health_every:
        return None
    return HealthProbe(
        fleets[STUDENT],
        {name: fleets[role] for name, role in teacher_roles(config).items()},
        config.metrics,
        (config.rollout.temperature, config.scoring.temperature),
        prepared.end_ids,
        prepared.student.vocab_size,
        name=uuid.uuid4().hex[:8],
        seed=config.run.seed,
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


def make_reward(judge: Judge | None) -> Reward | None:
    """Turn the judge into what the scorer asks for the reward of a rollout."""
    if judge is None:
        return None

    async def reward(rollout: Rollout) -> float | None:
        return await judge.reward(rollout.prompt, rollout.response_ids_T.tolist())

    return reward


@dataclass(frozen=True, slots=True)
class BatchLearner:
    """Acts as the controller's learner: cuts a batch into shares and sends them."""

    config: Config
    remote: RemoteLearner

    def prepare(self, sample: Sample) -> Sample:
        """Encode a scored sample. ValueError: it is malformed."""
        support = self.config.estimator.support
        draws = 1 if support.only_path else support.num_draws
        return EncodedSample.of(sample, draws)

    async def train(self, batch: Batch) -> UpdateMetrics:
        """Make one update. ValueError: the batch cannot be split into shares."""
        config = self.config
        batch = replace(batch, samples=tuple(map(self.prepare, batch.samples)))
        group_size = config.rollout.group_size
        return await self.remote.train(shares(batch, config.learner, config.estimator, group_size))


def make_generator(
    config: Config, fleet: RolloutFleet, vocab_size: int, run_id: str
) -> RolloutGenerator:
    """Make what samples rollouts from `fleet`."""
    return RolloutGenerator(
        fleet,
        config.rollout,
        config.estimator.support,
        vocab_size,
        run_id,
        routed_experts=config.learner.replays_experts,
        routed_gates=config.learner.replays_gates,
        seed=config.run.seed,
    )


def make_schedule(config: Config) -> Schedule:
    """Make the schedule of a whole run."""
    groups = config.selection.groups
    spread = groups if isinstance(groups, RewardSpread) else None
    return Schedule(
        updates=config.run.max_steps,
        batch_size=config.buffer.batch_size,
        kind=config.schedule,
        rollout_slots=config.rollout.concurrency,
        score_slots=config.scoring.concurrency,
        group_size=config.rollout.group_size if config.estimator.reads_groups else 1,
        groups=None if spread is None else GroupRule(spread, config.estimator.distils),
    )


def make_scorer(
    config: Config,
    fleets: Mapping[Role, Fleet],
    vocab_size: int,
    run_id: str,
    reward: Reward | None,
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
    )


def make_lengths(config: Config) -> Callable[[Rollout], Length]:
    """Make what judges the length of a response."""
    overlong, limit = config.selection.overlong, config.rollout.max_new_tokens

    def length(rollout: Rollout) -> Length:
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
) -> Controller:
    """Make the controller of one run, which continues from `state`."""
    run_id = uuid.uuid4().hex[:8]
    vocab_size = prepared.student.vocab_size
    ports = Ports(
        prompts=prepared.prompts,
        rollout=make_generator(config, fleets[STUDENT], vocab_size, run_id),
        teacher=make_scorer(config, fleets, vocab_size, run_id, make_reward(prepared.judge)),
        learner=BatchLearner(config, learner),
        weight_sync=weight_sync,
        observer=recorder,
        guard=guard,
        curriculum=curriculum_of(prepared),
        keeper=keeper,
    )
    return Controller(make_schedule(config), ports, state)
