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
from typing import Any

from megatron_opd.config.roles import STUDENT, Role, all_roles, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.config.site_bounds import slots_by_site, staleness_bound
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import EverythingDropped, LoopFailed
from megatron_opd.controller.garbage import collected_rarely
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import make_schedule
from megatron_opd.errors import UserError
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.launch.health import ProcessDied, WatchedProcess
from megatron_opd.metrics.memory import PeakMemory
from megatron_opd.metrics.observers import RunObserver
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.records.types import AnyRollout, Prompt
from megatron_opd.rollout.generator import make_generator
from megatron_opd.rollout.scorer import FleetScorer, make_scorer
from megatron_opd.sim.arrays import SharedArrays
from megatron_opd.sim.clock import run_virtual
from megatron_opd.sim.costs import Costs, Lengths, LognormalLengths, ScoreCost, SyncCost
from megatron_opd.sim.engine import Engine
from megatron_opd.sim.host import Host, OneByOne
from megatron_opd.sim.learner import SimulatedLearner, SimulatedTransport
from megatron_opd.sim.lengths import LengthDraws
from megatron_opd.sim.outcome import Outcome, SiteOutcome, outcome_of
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
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet

RUN_ID = "simulated"
NOTICE_S = 0.25
"""Mean seconds until the end of a process is seen: it is looked at every 0.5 s."""
FAILURE, REWARD = "failure", "reward"
NEED_SERVERS = ("health", "sync", "serve on")
"""Loops of the controller that fail where too few servers are left."""

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
    world = _World(config, costs, lengths or drawn_lengths(config))
    with collected_rarely(make_schedule(config).permits):
        return run_virtual(world.run(make_observer))


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
        self.lengths = LengthDraws(lengths, config.rollout.max_new_tokens, config.simulation.seed)
        self.arrays = SharedArrays()
        self.servers: dict[str, SimulatedServer[Any]] = {}
        self.urls: dict[Role, tuple[str, ...]] = {}
        self.clients: dict[str, Callable[[], Client]] = {}
        self.fleets: dict[Role, Fleet] = {}
        self.site_fleets: dict[str, dict[Role, Fleet]] = {}

    # ------------------------------------------------------------ parts

    def _start(self, host: Host) -> None:
        config, members = self.config, self.config.sites.members
        handle = OneByOne(host, self.costs.controller_s).work
        replies = Replies(self.arrays, self.lengths, self.costs.network_s, handle)
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

    def _all_fleets(self) -> Iterator[Fleet]:
        yield from self.fleets.values()
        for fleets in self.site_fleets.values():
            yield from fleets.values()

    def _weight_sync(
        self, fleet: Fleet, learner: SimulatedLearner, cost: SyncCost, host: Host, **settings: Any
    ) -> WeightSync:
        config = self.config.weight_sync
        transport = SimulatedTransport(
            fleet,
            cost,
            host,
            overlaps=config.overlap,
            starts=lambda url: self.servers[url].starts if self.servers[url].up else -1,
        )
        return WeightSync(fleet, learner, transport, config, **settings)

    def _scorer(self, fleets: Mapping[Role, Fleet]) -> FleetScorer:
        return make_scorer(self.config, fleets, VOCABULARY, RUN_ID, self._reward)

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
                    make_generator(config, fleets[STUDENT], VOCABULARY, RUN_ID, end_ids=()),
                    self._scorer(fleets) if member.scores else None,
                    sync,
                    slots_by_site(config)[name],
                    Rollouts(config.schedule.in_flight, sync.stranded),
                    up=Pipe(link.bytes_per_s),
                    down=Pipe(link.bytes_per_s),
                )
            )
        return found

    async def run(self, make_observer: MakeObserver | None) -> Outcome:
        """Make all updates."""
        config, costs = self.config, self.costs
        clock = asyncio.get_running_loop().time
        host = Host(costs.host_cores)
        self._start(host)
        samplers = self.urls[STUDENT][config.evaluation.servers :]
        totals = RunTotals(samplers, config.rollout.group_size)
        totals.memory = Unmeasured()
        if make_observer is None:
            observer: RunObserver = RunRecorder(totals, clock=clock)
        else:
            observer = make_observer(totals, self.urls)
        supervisor = None if config.simulation.failures is None else self._supervisor()
        learner = SimulatedLearner(costs.learner, config.learner.num_mini_batches, host)
        cause: str | None = None
        async with AsyncExitStack() as stack:
            stack.callback(observer.close)
            for fleet in self._all_fleets():
                await fleet.start()
                stack.push_async_callback(fleet.close)
            settings: dict[str, Any] = {}
            if supervisor is not None:
                await stack.enter_async_context(supervisor.watching())
                settings["lose"] = supervisor.lose
                for index, url in enumerate(self.servers):
                    stack.callback(asyncio.create_task(self._fail(url, index)).cancel)
            far: list[SimulatedSite] = []
            if config.sites.members:
                far = await self._sites(learner, host)
                near = None if all(site.scorer for site in far) else self._scorer(self.fleets)
                all_sites = SimulatedSites(config, far, near, costs.sync, host)
                parts: dict[str, Any] = {
                    "rollout": all_sites,
                    "teacher": all_sites,
                    "weight_sync": all_sites,
                }
            else:
                student = self.fleets[STUDENT]
                sync = self._weight_sync(student, learner, costs.sync, host, **settings)
                await sync.open()
                generator = make_generator(config, student, VOCABULARY, RUN_ID, end_ids=())
                parts = {
                    "rollout": generator,
                    "teacher": self._scorer(self.fleets),
                    "weight_sync": sync,
                }
            controller = Controller(
                make_schedule(config),
                Ports(
                    prompts=self._prompts(),
                    learner=learner,
                    observer=observer,
                    guard=None if supervisor is None else SimulatedGuard(supervisor),
                    **parts,
                ),
            )
            try:
                await controller.run()
            except LoopFailed as failure:
                # servers that fail may be too many for a run, delays too long for a window;
                # anything else is a fault in here
                lost_servers = supervisor is not None and failure.loop in NEED_SERVERS
                if not lost_servers and not isinstance(failure.cause, EverythingDropped):
                    raise
                cause = str(failure)
            wall_s = clock()
            if not wall_s:
                raise UserError(
                    "costs: something must take time, but all of this run took 0 seconds; raise "
                    "learner.token_s, learner.update_s or sync.sync_s"
                )
            busy = self._busy(wall_s)
            sites = {site.name: self._site_outcome(site, wall_s) for site in far}
        return outcome_of(
            totals,
            controller.accounting,
            wall_s=wall_s,
            bound=staleness_bound(config),
            busy=busy,
            fleets=list(self._all_fleets()),
            supervisor=supervisor,
            cause=cause,
            sites=sites,
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
