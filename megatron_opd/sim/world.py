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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from megatron_opd.config.roles import STUDENT, Role, all_roles, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import EverythingDropped, LoopFailed
from megatron_opd.controller.garbage import rare_collections
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.ports import Ports, RolloutEngine, TeacherScorer, WeightSyncer
from megatron_opd.controller.schedule import make_schedule
from megatron_opd.errors import UserError
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.launch.health import ProcessDied, WatchedProcess
from megatron_opd.metrics.memory import PeakMemory
from megatron_opd.metrics.observers import RunObserver
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting
from megatron_opd.records.mixtures import Shares, label_of, shares_of
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.records.types import AnyRollout, Prompt
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.rollout.trajectories import TrajectoryGenerator
from megatron_opd.sim.arrays import SharedArrays
from megatron_opd.sim.clock import run_virtual
from megatron_opd.sim.costs import (
    Costs,
    Lengths,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.drawn_lengths import check_lengths, drawn_lengths, draws_of, limits_of
from megatron_opd.sim.engine import Engine
from megatron_opd.sim.host import Host, OneByOne
from megatron_opd.sim.learner import SimulatedLearner, SimulatedTransport
from megatron_opd.sim.outcome import Outcome, SiteOutcome
from megatron_opd.sim.pipes import Pipe
from megatron_opd.sim.scoring import Scorer
from megatron_opd.sim.servers import (
    VOCABULARY,
    Client,
    Replies,
    SimulatedServer,
    SimulatedStudent,
    StudentClient,
    TeacherClient,
)
from megatron_opd.sim.sites import SimulatedSite, SimulatedSites
from megatron_opd.sim.trajectories import SimulatedPlaying
from megatron_opd.weight_sync.session import Lose, WeightSync, needed
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet

RUN_ID = "simulated"
NOTICE_S = 0.25
"""Mean seconds until the end of a process is seen: it is looked at every 0.5 s."""
FAILURE, REWARD = "failure", "reward"
NEED_SERVERS = ("health", "sync", "serve on")
"""Loops of the controller that fail where too few servers are left."""

Engines = tuple[RolloutEngine, TeacherScorer, Rollouts | None]
"""What samples, what scores, and what holds turns back (run.stages.SampleSource)."""
MakeObserver = Callable[[RunTotals, Mapping[Role, tuple[str, ...]]], RunObserver]
"""Makes what observes a run, inside its event loop, from its totals and its servers by role."""


def simulate(
    config: Config,
    costs: Costs,
    lengths: Lengths | None = None,
    make_observer: MakeObserver | None = None,
) -> Outcome:
    """Simulate a run. lengths: None draws them as config.simulation.lengths says.

    UserError: costs that do not go with the configuration.
    """
    check_costs(config, costs)
    lengths = lengths or drawn_lengths(config)
    check_lengths(config, lengths)
    world = _World(config, costs, lengths)
    with rare_collections(make_schedule(config).permits):
        return run_virtual(world.run(make_observer))


def check_costs(config: Config, costs: Costs) -> None:
    """Check that all parts of a run have costs. UserError: one has none, or cannot be."""
    missing = sorted(teacher_roles(config).keys() - costs.teachers.keys())
    if missing:
        raise UserError(f"costs: teachers must name every teacher, missing {', '.join(missing)}")
    batch, minis = config.buffer.batch_size, config.learner.num_mini_batches
    if batch // minis < costs.learner.ranks:
        raise UserError(
            "buffer.batch_size / learner.num_mini_batches must be at least the costs' "
            f"learner.ranks, got {batch} / {minis} and {costs.learner.ranks}"
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
        self.lengths, self.arrays = draws_of(config, lengths), SharedArrays()
        self.playing: SimulatedPlaying | None = None
        limits = limits_of(config)
        if limits is not None:
            by_turn = config.estimator.credit == "turn"
            reward = self._drawn_reward if by_turn else None
            self.playing = SimulatedPlaying(
                self.lengths, limits, self.arrays, config.run.seed, reward
            )
        self.servers: dict[str, SimulatedServer[Any]] = {}
        self.urls: dict[Role, tuple[str, ...]] = {}
        self.clients: dict[str, Callable[[], Client]] = {}
        self.fleets: dict[Role, Fleet] = {}
        self.site_fleets: dict[str, dict[Role, Fleet]] = {}

    # ------------------------------------------------------------ parts

    def _start(self, host: Host) -> None:
        config, members = self.config, self.config.sites.members
        handle = OneByOne(host, self.costs.controller_s).work
        network_s = self.costs.network_s
        replies = Replies(self.arrays, self.lengths, network_s, handle, self.playing)
        for role in all_roles(config):
            section, sampling = section_of(config, role), role == STUDENT
            count = len(section.urls) or section.servers
            self.urls[role] = ()
            for name, site in members.items():
                if sampling or site.scores:
                    servers = (sampling and site.servers) or count
                    fleet = self._fleet(role, f"{name}-{role}", servers, host, replies)
                    self.site_fleets.setdefault(name, {})[role] = fleet
            if not members or not (sampling or all(site.scores for site in members.values())):
                kept = config.evaluation.servers if sampling else 0
                self.fleets[role] = self._fleet(role, role, count, host, replies, kept)

    def _fleet(
        self, role: Role, place: str, count: int, host: Host, replies: Replies, kept: int = 0
    ) -> Fleet:
        """Start the servers of a role at one place."""
        names = {role: name for name, role in teacher_roles(self.config).items()}
        urls = tuple(f"http://{place}-{i}:1" for i in range(count))
        for url in urls:
            if role == STUDENT:
                self._add_student(url, host, replies)
            else:
                self._add_teacher(url, self.costs.teachers[names[role]], host, replies)
        self.urls[role] += urls
        return Fleet([self.clients[url]() for url in urls], kept)

    def _add_student(self, url: str, host: Host, replies: Replies) -> None:
        cost = self.costs.engine
        server = SimulatedStudent(url, lambda: Engine(cost), host, cost.front_cores)
        self.servers[url] = server
        self.clients[url] = lambda: StudentClient(server, replies)

    def _add_teacher(self, url: str, cost: ScoreCost, host: Host, replies: Replies) -> None:
        server = SimulatedServer(url, lambda: Scorer(cost), host, cost.front_cores)
        self.servers[url] = server
        self.clients[url] = lambda: TeacherClient(server, replies)

    def _prompts(self) -> Iterator[Prompt]:
        """Yield prompts without end; those of a group are alike in nothing but their teacher."""
        config = self.config
        teachers = list(teacher_roles(config)) or ["teacher"]
        choices: list[Shares] = [((name, 1.0),) for name in teachers]
        if config.scoring.mixture:
            choices = [shares_of(config.scoring.mixture)]
        elif config.data.teacher_key is None:
            choices = choices[:1]
        lengths, arrays = self.lengths, self.arrays
        for uid in itertools.count():
            if self.playing is None:
                tokens = lengths.prompt(derived_seed(config.run.seed, ROLLOUT, uid))
            else:
                tokens = self.playing.turns(uid)[0].given
            shares = choices[uid // config.rollout.group_size % len(choices)]
            prompt = Prompt(uid, str(uid), arrays.ids(tokens), None, label_of(shares))
            yield replace(prompt, mixture=shares) if len(shares) > 1 else prompt

    async def _reward(self, rollout: AnyRollout) -> float:
        return self._drawn_reward(rollout.prompt.uid)

    def _drawn_reward(self, uid: int) -> float:
        """Return 0 or 1, all alike in the share of groups that the configuration says."""
        simulation = self.config.simulation
        group, member = divmod(uid, self.config.rollout.group_size)
        drawn = derived_seed(simulation.seed, REWARD, group) / 2**63
        if drawn < simulation.uniform_groups:
            return float(drawn < simulation.uniform_groups / 2)
        return float(member % 2)

    # ------------------------------------------------------------ what Supervisor asks of processes

    def watched_server(self, url: str) -> list[WatchedProcess]:
        """Return the one process of a server; -9 once it is down."""
        server = self.servers[url]
        return [WatchedProcess(url, lambda: None if server.up else -9)]

    def discard(self, url: str) -> None:
        """Let a server die."""
        self.servers[url].die()

    async def put_another(self, url: str) -> str:
        """Put another in the place of a server, at the same url."""
        self.discard(url)
        return url

    async def start_one(self, url: str, timeout_s: float) -> None:
        """Take as long as a start does. timeout_s is not looked at."""
        failures = self.config.simulation.failures
        assert failures is not None
        await asyncio.sleep(failures.start_s)
        self.servers[url].start()

    async def _take_in(self, role: Role, url: str) -> ServerClient:
        client = self.clients[url]()
        self.fleets[role].add(client, await client.info())
        return client

    def _supervisor(self) -> Supervisor:
        def death_of(processes: Sequence[WatchedProcess], engines: object) -> DeathWatch:
            return DeathWatch(self.servers[processes[0].name])

        return Supervisor(
            self.config, self.fleets, self, self._take_in, lambda line: None, death_of
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

    def _all_fleets(self) -> Iterator[Fleet]:
        yield from self.fleets.values()
        for fleets in self.site_fleets.values():
            yield from fleets.values()

    def _weight_sync(
        self,
        fleet: Fleet,
        learner: SimulatedLearner,
        cost: SyncCost,
        host: Host,
        lose: Lose = needed,
    ) -> WeightSync:
        config = self.config.weight_sync
        transport = SimulatedTransport(
            fleet,
            cost,
            host,
            overlaps=config.overlap,
            starts=lambda url: self.servers[url].starts if self.servers[url].up else -1,
        )
        return WeightSync(fleet, learner, transport, config, lose)

    def _scorer(self, fleets: Mapping[Role, Fleet]) -> FleetScorer:
        return FleetScorer(self.config, fleets, VOCABULARY, RUN_ID, self._reward)

    async def _sites(self, learner: SimulatedLearner, host: Host) -> list[SimulatedSite]:
        """Make the sites, whose servers have the weights that the run starts with."""
        config, link, found = self.config, self.config.sites.link, list[SimulatedSite]()
        paused = self.costs.sync.paused_s
        cost = SyncCost(sync_s=paused, paused_s=paused, num_bytes=self.costs.sync.num_bytes)
        for name, member in config.sites.members.items():
            fleets = self.site_fleets[name]
            sync = self._weight_sync(fleets[STUDENT], learner, cost, host)
            await sync.open()
            found.append(
                SimulatedSite(
                    name,
                    RolloutGenerator(config, fleets[STUDENT], VOCABULARY, RUN_ID, end_ids=()),
                    self._scorer(fleets) if member.scores else None,
                    sync,
                    config.site_slots[name],
                    Rollouts(config.schedule.in_flight, sync),
                    up=Pipe(link.bytes_per_s),
                    down=Pipe(link.bytes_per_s),
                )
            )
        return found

    async def run(self, make_observer: MakeObserver | None) -> Outcome:
        """Make all updates."""
        config, clock = self.config, asyncio.get_running_loop().time
        host = Host(self.costs.host_cores)
        self._start(host)
        totals = RunTotals(
            self.urls[STUDENT][config.evaluation.servers :], config.rollout.group_size
        )
        totals.memory = Unmeasured()
        if make_observer is None:
            observer: RunObserver = RunRecorder(totals, clock=clock)
        else:
            observer = make_observer(totals, self.urls)
        learner = SimulatedLearner(self.costs.learner, config.learner.num_mini_batches, host)
        async with AsyncExitStack() as stack:
            stack.callback(observer.close)
            supervisor = await self._serve(stack)
            lose = needed if supervisor is None else supervisor.lose
            engines, weight_sync, far = await self._sampling(learner, host, lose)
            rollout, teacher, turns = engines
            ports = Ports(
                self._prompts(),
                rollout,
                teacher,
                learner,
                weight_sync,
                observer,
                guard=None if supervisor is None else SimulatedGuard(supervisor),
                hold=turns,
            )
            controller = Controller(make_schedule(config), ports)
            cause = await _trained(controller, loses_servers=supervisor is not None)
            if not clock():
                raise UserError(
                    "costs: something must take time, but all of this run took 0 seconds; raise "
                    "learner.token_s, learner.update_s or sync.sync_s"
                )
            return self._outcome(totals, controller.accounting, far, supervisor, cause)

    async def _serve(self, stack: AsyncExitStack) -> Supervisor | None:
        """Start the fleets, and let servers fail and be started again where they do."""
        supervisor = None if self.config.simulation.failures is None else self._supervisor()
        for fleet in self._all_fleets():
            await fleet.start()
            stack.push_async_callback(fleet.close)
        if supervisor is not None:
            await stack.enter_async_context(supervisor.watching())
            for index, url in enumerate(self.servers):
                stack.callback(asyncio.create_task(self._fail(url, index)).cancel)
        return supervisor

    async def _sampling(
        self, learner: SimulatedLearner, host: Host, lose: Lose
    ) -> tuple[Engines, WeightSyncer, list[SimulatedSite]]:
        """Make what samples, scores and takes weights, and the sites that do, if there are any."""
        config, costs = self.config, self.costs
        if config.sites.members:
            far = await self._sites(learner, host)
            near = None if all(site.scorer for site in far) else self._scorer(self.fleets)
            all_sites = SimulatedSites(config, far, near, costs.sync, host)
            return (all_sites, all_sites, None), all_sites, far
        student = self.fleets[STUDENT]
        sync = self._weight_sync(student, learner, costs.sync, host, lose)
        await sync.open()
        generator = RolloutGenerator(config, student, VOCABULARY, RUN_ID, end_ids=())
        scorer = self._scorer(self.fleets)
        if self.playing is None:
            return (generator, scorer, None), sync, []
        turns = Rollouts(config.schedule.in_flight, sync)
        seed = config.run.seed
        played = TrajectoryGenerator(generator, student, self.playing, seed, turns)
        return (played, scorer, turns), sync, []

    def _outcome(
        self,
        totals: RunTotals,
        accounting: Accounting,
        far: list[SimulatedSite],
        supervisor: Supervisor | None,
        cause: str | None,
    ) -> Outcome:
        """Return the figures of a run that has ended now."""
        wall_s = asyncio.get_running_loop().time()
        times, tokens, fleets = totals.times, totals.staleness.tokens, list(self._all_fleets())
        busy, idle = self._busy(wall_s), times.learner_idle_ratio()
        teachers = [share for role, share in busy.items() if role != STUDENT]
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
            staleness_bound=self.config.staleness_bound,
            busy=busy | ({} if idle is None else {"learner": 1 - idle}),
            servers_lost={} if supervisor is None else supervisor.lost,
            servers_restarted=0 if supervisor is None else supervisor.restarted.total(),
            samples_readmitted=sum(fleet.restarted for fleet in fleets),
            requests_timed_out=sum(fleet.timed_out for fleet in fleets),
            cause=cause,
            totals=totals,
            accounting=accounting,
            sites={site.name: self._site_outcome(site, wall_s) for site in far},
        )

    def _busy(self, wall_s: float) -> dict[str, float]:
        """Return the share of the time in which the average server of a role works."""
        return {
            role: sum(self.servers[url].worked_s() for url in urls) / len(urls) / wall_s
            for role, urls in self.urls.items()
        }

    def _site_outcome(self, site: SimulatedSite, wall_s: float) -> SiteOutcome:
        urls = self.site_fleets[site.name][STUDENT].urls
        worked_s = sum(self.servers[url].worked_s() for url in urls)
        return SiteOutcome(site.samples, site.loads, 1 - worked_s / len(urls) / wall_s)


async def _trained(controller: Controller, *, loses_servers: bool) -> str | None:
    """Return why the run ended early; None: it made all its updates."""
    try:
        await controller.run()
    except LoopFailed as failure:
        # servers that fail may be too many for a run, delays too long for a window;
        # anything else is a fault in here
        lost_servers = loses_servers and failure.loop in NEED_SERVERS
        if not lost_servers and not isinstance(failure.cause, EverythingDropped):
            raise
        return str(failure)
    return None


class DeathWatch:
    """Notices the end of a simulated server, as the health guard does, without looking at it."""

    def __init__(self, server: SimulatedServer[Any]) -> None:
        self._server = server

    async def watch(self) -> None:
        """Run until cancelled. Raises ProcessDied."""
        await self._server.died.wait()
        await asyncio.sleep(NOTICE_S)
        raise ProcessDied(f"server {self._server.url} ended")


class SimulatedGuard:
    """Ends a run that has too few servers; a controller.ports.Guard."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def watch(self) -> None:
        """Run until cancelled; raise what the run cannot go on without."""
        raise await self._supervisor.failed()

    async def diagnose(self, error: Exception) -> Exception | None:
        """Return None: nothing else knows more."""
        return None
