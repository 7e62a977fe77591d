"""Runs the controller that ships on simulated servers, learner and weight sync, on a virtual clock.

Real: the controller with its permits, buffer and groups, RolloutGenerator, FleetScorer, Fleet,
WeightSync and its steps, the Supervisor where servers fail, and the recorder. Simulated: what takes
time (megatron_opd/sim) and the clock. `simulate` touches no file and depends on its arguments
alone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.roles import STUDENT, Role, all_roles, section_of, teacher_roles
from megatron_opd.cli.supervisor import Supervisor
from megatron_opd.cli.wiring import make_generator, make_schedule, make_scorer
from megatron_opd.config.schema import Config
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.garbage import collected_rarely
from megatron_opd.controller.health import ProcessDied, WatchedProcess
from megatron_opd.controller.ports import Ports
from megatron_opd.data.seeds import ROLLOUT, derived_seed
from megatron_opd.metrics.memory import PeakMemory
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting
from megatron_opd.sim.arrays import SharedArrays
from megatron_opd.sim.clock import run_virtual
from megatron_opd.sim.costs import Costs, Lengths, LognormalLengths, ScoreCost
from megatron_opd.sim.engine import Engine
from megatron_opd.sim.host import Host, OneByOne
from megatron_opd.sim.learner import SimulatedLearner, SimulatedTransport
from megatron_opd.sim.lengths import LengthDraws
from megatron_opd.sim.scoring import Scorer
from megatron_opd.sim.servers import (
    VOCABULARY,
    Client,
    Replies,
    Server,
    Student,
    StudentClient,
    TeacherClient,
)
from megatron_opd.types import AnyRollout, Prompt
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet

RUN_ID = "simulated"
NOTICE_S = 0.25
"""Mean seconds until the end of a process is seen: it is looked at every 0.5 s."""
FAILURE, REWARD = "failure", "reward"
NEED_SERVERS = ("health", "sync", "serve on")
"""Loops of the controller that fail where too few servers are left."""

MakeRecorder = Callable[[RunTotals, Mapping[Role, tuple[str, ...]]], RunRecorder]
"""Makes what records a run, inside its event loop, from its totals and its servers by role."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what came of a simulated run.

    wall_s: virtual seconds. tokens_per_s: response tokens trained on, after five updates; None: no
    more. *_idle_ratio: as in summary.json; teacher: of the average server, None without.
    staleness_*: in versions. busy: share of the time in which the learner, or the average server of
    a role, works. cause: why the run ended early; None: it made all its updates.
    """

    wall_s: float
    updates: int
    samples: int
    samples_per_s: float
    tokens_per_s: float | None
    updates_per_hour: float
    learner_idle_ratio: float | None
    rollout_idle_ratio: float | None
    teacher_idle_ratio: float | None
    staleness_mean: float | None
    staleness_max: int | None
    staleness_bound: int
    busy: dict[str, float]
    servers_lost: dict[str, str]
    servers_restarted: int
    samples_readmitted: int
    requests_timed_out: int
    cause: str | None
    totals: RunTotals
    accounting: Accounting


def simulate(
    config: Config,
    costs: Costs,
    lengths: Lengths | None = None,
    make_recorder: MakeRecorder | None = None,
) -> Outcome:
    """Simulate a run. lengths: None draws them as config.simulation.lengths says.

    UserError: costs that do not go with the configuration.
    """
    check_costs(config, costs)
    world = _World(config, costs, lengths or drawn_lengths(config))
    with collected_rarely(make_schedule(config).permits):
        return run_virtual(world.run(make_recorder))


def drawn_lengths(config: Config) -> LognormalLengths:
    """Return the distribution that config.simulation.lengths describes."""
    section = config.simulation.lengths
    mean = section.mean or config.rollout.max_new_tokens / 2
    return LognormalLengths(mean=mean, cv=section.cv, prompt_tokens=section.prompt_tokens)


def check_costs(config: Config, costs: Costs) -> None:
    """Check that all parts of a run have costs. UserError: one has none, or cannot be."""
    missing = sorted(teacher_roles(config).keys() - costs.teachers.keys())
    if missing:
        raise UserError(f"costs: teachers must name every teacher, missing {', '.join(missing)}")
    shares = config.learner.num_mini_batches * costs.learner.ranks
    if config.buffer.batch_size % shares:
        raise UserError(
            "buffer.batch_size must be a multiple of learner.num_mini_batches * the costs' "
            f"learner.ranks, got {config.buffer.batch_size} for "
            f"{config.learner.num_mini_batches} * {costs.learner.ranks}"
        )


class Unmeasured(PeakMemory):
    """Measures no memory: that of the simulator says nothing of a run."""

    def sample(self) -> int:
        """Return 0 without measuring."""
        return 0


class _World:
    """Holds the simulated processes of one run. Make it inside the event loop's run."""

    def __init__(self, config: Config, costs: Costs, lengths: Lengths) -> None:
        self.config, self.costs = config, costs
        self.lengths = LengthDraws(lengths, config.rollout.max_new_tokens, config.simulation.seed)
        self.arrays = SharedArrays()
        self.servers: dict[str, Server[Any]] = {}
        self.urls: dict[Role, tuple[str, ...]] = {}
        self.clients: dict[str, Callable[[], Client]] = {}
        self.fleets: dict[Role, Fleet] = {}

    # ------------------------------------------------------------ parts

    def _start(self, host: Host) -> None:
        config, costs = self.config, self.costs
        handle = OneByOne(host, costs.controller_s).work
        replies = Replies(self.arrays, self.lengths, costs.network_s, handle)
        names = {role: name for name, role in teacher_roles(config).items()}
        for role in all_roles(config):
            section = section_of(config, role)
            count = len(section.urls) or section.servers
            self.urls[role] = tuple(f"http://{role}-{i}:1" for i in range(count))
            for url in self.urls[role]:
                if role == STUDENT:
                    self._add_student(url, host, replies)
                else:
                    self._add_teacher(url, costs.teachers[names[role]], host, replies)
            kept = config.evaluation.servers if role == STUDENT else 0
            self.fleets[role] = Fleet([self.clients[url]() for url in self.urls[role]], kept)

    def _add_student(self, url: str, host: Host, replies: Replies) -> None:
        cost = self.costs.engine
        server = Student(url, lambda: Engine(cost), host, cost.front_cores)
        self.servers[url] = server
        self.clients[url] = lambda: StudentClient(server, replies)

    def _add_teacher(self, url: str, cost: ScoreCost, host: Host, replies: Replies) -> None:
        server = Server(url, lambda: Scorer(cost), host, cost.front_cores)
        self.servers[url] = server
        self.clients[url] = lambda: TeacherClient(server, replies)

    def _prompts(self) -> Iterator[Prompt]:
        """Yield prompts without end; those of a group are alike in nothing but their teacher."""
        config = self.config
        teachers = list(teacher_roles(config)) or ["teacher"]
        if config.data.teacher_key is None:
            teachers = teachers[:1]
        lengths, arrays = self.lengths, self.arrays
        for uid in itertools.count():
            tokens = lengths.prompt(derived_seed(config.run.seed, ROLLOUT, uid))
            teacher = teachers[uid // config.rollout.group_size % len(teachers)]
            yield Prompt(uid, "", arrays.ids(tokens), None, teacher)

    async def _reward(self, rollout: AnyRollout) -> float:
        """Return 0 or 1, all alike in the share of groups that the configuration says."""
        simulation = self.config.simulation
        group, member = divmod(rollout.prompt.uid, self.config.rollout.group_size)
        drawn = derived_seed(simulation.seed, REWARD, group) / 2**63
        if drawn < simulation.uniform_groups:
            return float(drawn < simulation.uniform_groups / 2)
        return float(member % 2)

    # ------------------------------------------------------------ what Supervisor asks of processes

    def watched_server(self, url: str) -> list[WatchedProcess]:
        """Act as cli.processes.Processes does."""
        server = self.servers[url]
        return [WatchedProcess(url, lambda: None if server.up else -9)]

    def discard(self, url: str) -> None:
        """Act as cli.processes.Processes does."""
        self.servers[url].die()

    async def put_another(self, url: str) -> str:
        """Act as cli.processes.Processes does."""
        self.discard(url)
        return url

    async def start_one(self, url: str, timeout_s: float) -> None:
        """Act as cli.processes.Processes does."""
        failures = self.config.simulation.failures
        assert failures is not None
        await asyncio.sleep(failures.start_s)
        self.servers[url].start()

    async def _take_in(self, role: Role, url: str) -> ServerClient:
        client = self.clients[url]()
        self.fleets[role].add(client, await client.info())
        return client

    def _supervisor(self) -> Supervisor:
        processes: Any = self

        def death_of(processes: Any, engines: Any) -> DeathWatch:
            return DeathWatch(self.servers[processes[0].name])

        return Supervisor(
            self.config, self.fleets, processes, self._take_in, lambda line: None, death_of
        )

    async def _fail(self, url: str, index: int) -> None:
        """Let a server die again and again."""
        simulation = self.config.simulation
        assert simulation.failures is not None
        rng = random.Random(derived_seed(simulation.seed, FAILURE, index))
        while True:
            hours = rng.expovariate(1 / simulation.failures.mean_hours)
            await asyncio.sleep(3600 * hours)
            self.servers[url].die()
            await self.servers[url].started.wait()

    # ------------------------------------------------------------ the run

    async def run(self, make_recorder: MakeRecorder | None) -> Outcome:
        """Make all updates."""
        config, costs = self.config, self.costs
        clock = asyncio.get_running_loop().time
        host = Host(costs.host_cores)
        self._start(host)
        samplers = self.urls[STUDENT][config.evaluation.servers :]
        totals = RunTotals(samplers, config.rollout.group_size)
        totals.memory = Unmeasured()
        if make_recorder is None:
            recorder = RunRecorder(config.run.max_steps, totals, clock=clock)
        else:
            recorder = make_recorder(totals, self.urls)
        supervisor = None if config.simulation.failures is None else self._supervisor()
        learner = SimulatedLearner(costs.learner, config.learner.num_mini_batches, host)
        transport = SimulatedTransport(
            self.fleets[STUDENT],
            costs.sync,
            host,
            overlaps=config.weight_sync.overlap,
            starts=lambda url: self.servers[url].starts if self.servers[url].up else -1,
        )
        cause: str | None = None
        async with AsyncExitStack() as stack:
            stack.callback(recorder.close)
            for fleet in self.fleets.values():
                await fleet.start()
                stack.push_async_callback(fleet.close)
            settings: dict[str, Any] = {}
            if supervisor is not None:
                await stack.enter_async_context(supervisor.watching())
                settings["lose"] = supervisor.lose
                for index, url in enumerate(self.servers):
                    stack.callback(asyncio.create_task(self._fail(url, index)).cancel)
            student = self.fleets[STUDENT]
            sync = WeightSync(student, learner, transport, config.weight_sync, **settings)
            await sync.open()
            controller = Controller(
                make_schedule(config),
                Ports(
                    prompts=self._prompts(),
                    rollout=make_generator(config, student, VOCABULARY, RUN_ID),
                    teacher=make_scorer(config, self.fleets, VOCABULARY, RUN_ID, self._reward),
                    learner=learner,
                    weight_sync=sync,
                    observer=recorder,
                    guard=None if supervisor is None else Guard(supervisor),
                ),
            )
            try:
                await controller.run()
            except LoopFailed as failure:
                # servers that fail may be too many for a run; anything else is a fault in here
                if supervisor is None or failure.loop not in NEED_SERVERS:
                    raise
                cause = str(failure)
            wall_s = clock()
            if not wall_s:
                raise UserError(
                    "costs: something must take time, but all of this run took 0 seconds; raise "
                    "learner.token_s, learner.update_s or sync.sync_s"
                )
            busy = self._busy(wall_s)
        return self._outcome(totals, controller.accounting, wall_s, busy, supervisor, cause)

    def _busy(self, wall_s: float) -> dict[str, float]:
        """Return the share of the time in which the average server of a role works."""
        return {
            role: sum(self.servers[url].worked_s() for url in urls) / len(urls) / wall_s
            for role, urls in self.urls.items()
        }

    def _outcome(
        self,
        totals: RunTotals,
        accounting: Accounting,
        wall_s: float,
        busy: dict[str, float],
        supervisor: Supervisor | None,
        cause: str | None,
    ) -> Outcome:
        times, tokens = totals.times, totals.staleness.tokens
        teachers = [share for role, share in busy.items() if role != STUDENT]
        idle = times.learner_idle_ratio()
        return Outcome(
            wall_s=wall_s,
            updates=accounting.updates,
            samples=accounting.consumed,
            samples_per_s=accounting.consumed / wall_s,
            tokens_per_s=totals.throughput.tokens_per_s(),
            updates_per_hour=3600 * accounting.updates / wall_s,
            learner_idle_ratio=idle,
            rollout_idle_ratio=times.fleet_idle_ratio(),
            teacher_idle_ratio=1 - sum(teachers) / len(teachers) if teachers else None,
            staleness_mean=tokens.mean,
            staleness_max=tokens.max,
            staleness_bound=self.config.schedule.bound(self.config.buffer.batch_size),
            busy=busy | ({} if idle is None else {"learner": 1 - idle}),
            servers_lost={} if supervisor is None else supervisor.lost,
            servers_restarted=0 if supervisor is None else supervisor.restarted.total(),
            samples_readmitted=sum(fleet.restarted for fleet in self.fleets.values()),
            requests_timed_out=sum(fleet.timed_out for fleet in self.fleets.values()),
            cause=cause,
            totals=totals,
            accounting=accounting,
        )


class DeathWatch:
    """Notices the end of a simulated server, as the health guard does, without looking at it."""

    def __init__(self, server: Server[Any]) -> None:
        self._server = server

    async def watch(self) -> None:
        """Run until cancelled. Raises ProcessDied."""
        await self._server.died.wait()
        await asyncio.sleep(NOTICE_S)
        raise ProcessDied(f"server {self._server.url} ended")


class Guard:
    """Ends a run that has too few servers; a controller.ports.Guard."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def watch(self) -> None:
        """Run until cancelled; raise what the run cannot go on without."""
        raise await self._supervisor.failed()

    async def diagnose(self) -> Exception | None:
        """Return None: nothing else knows more."""
        return None
