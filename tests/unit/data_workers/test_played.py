"""Trajectories that a data worker plays are those that the controller would have played itself.

A whole worker and the controller's pool, over their sockets; servers sample by seed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replace_fields

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.config.schedule import InFlight
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data_workers import played as played_module
from megatron_opd.data_workers.checks import PlayedRules
from megatron_opd.data_workers.played import PlayedByWorkers
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.data_workers.under_way import Playroom, described
from megatron_opd.data_workers.worker import Worker
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.play import Played, PlayedTurn, TurnSampler
from megatron_opd.environments.playing import Playing
from megatron_opd.environments.protocol import EnvironmentRow, TrajectoryEnd
from megatron_opd.environments.trajectory import BuiltTrajectory
from megatron_opd.metrics.turns import turn_columns
from megatron_opd.records.drops import ENVIRONMENT_FAILED
from megatron_opd.records.runs import SampledRun
from megatron_opd.records.turns import SampledTurn
from megatron_opd.records.types import HeldRollout, HeldSample, Rollout, Sample
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.resumed import ResumeCounts, ResumedTrajectories
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.rollout.trajectories import TrajectoryGenerator
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from tests.support import playing
from tests.support.fakes import make_prompt
from tests.support.playing import (
    END,
    WIDE,
    Echoing,
    SeededServers,
    everything,
    played_here,
    trajectories,
)
from tests.support.wire import KEYS

URL = "http://host:1"
UIDS = range(3, 8)
ASK = TeacherAsk("score-0", 1.0, 0, 0, 7, 512)


class Quick(SeededServers):
    """Real time, so none of it is waited for; `loses`: which requests are lost.

    held: those that never end.
    """

    def __init__(self, loses: Sequence[int] = ()) -> None:
        super().__init__()
        self.loses, self.gate, self.held = loses, asyncio.Event(), list[int]()
        self.gate.set()

    async def generate(self, request: RolloutRequest, *, prefer: str = "") -> RolloutReply:
        reply = await super().generate(request)
        await self.gate.wait()
        if self.held and len(self.requests) in self.held:
            await asyncio.Event().wait()
        if len(self.requests) in self.loses:
            raise ServerUnreachable(URL, "/generate", "reset", sent=True)
        return replace(reply, url=URL)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Give half the sampler's log-probs: any numbers that depend on the ids."""
        return ScoreReply((-0.01 * request.ids_N).astype("float32"))


class OneServer:
    """Stands for a fleet of one."""

    def __init__(self) -> None:
        self.client = ServerClient(URL, timeout_s=1e9)
        self.prefers: list[str] = []
        self.working = self.most = 0

    async def until_none_serves(self) -> None:
        await asyncio.Event().wait()

    async def ask(self, call: Any, num_tokens: Any, *, prefer: str = "") -> Any:
        self.prefers.append(prefer)
        self.working += 1
        self.most = max(self.most, self.working)
        try:
            reply = await call(self.client)
        finally:
            self.working -= 1
        assert num_tokens(reply) > 0
        return reply


class Ends:
    """A pool, some workers, and what the controller samples with."""

    def __init__(
        self, pool: WorkerPool, servers: Quick, plays: Playing, count: int, policy: InFlight
    ) -> None:
        self.pool, self.servers, self.fleet = pool, servers, OneServer()
        self.counts = ResumeCounts()
        fleet: Any = self.fleet
        self.hold = Rollouts(policy, fleet)
        rules = PlayedRules(replace(WIDE, max_sequences=2), 2, 2)
        played: Any = PlayedByWorkers(pool, fleet, 2, self.hold, rules)
        self.engine = ResumedTrajectories(played, self.counts)
        self.workers: list[Worker] = []
        for index in range(count):
            room = Playroom(playing.config(), plays, 400, Ending((END,)), f"w{index}")
            worker = Worker(pool.connections.address, index, "127.0.0.1", KEYS.ranks, None, 4, room)
            clients: Any = lambda endpoint: servers  # noqa: E731
            worker._store._clients = clients
            self.workers.append(worker)
        self.running = [asyncio.create_task(worker.run()) for worker in self.workers]


def drive(
    body: Callable[[Ends], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    plays: Playing | None = None,
    loses: Sequence[int] = (),
    count: int = 1,
    policy: InFlight = "in_place",
) -> None:
    monkeypatch.setattr(playing, "SAMPLING_S", 0.0)

    async def main() -> None:
        pool = WorkerPool(count, "127.0.0.1", KEYS, 1 << 22)
        pool.connections.open()
        ends = Ends(pool, Quick(loses), plays or played_here(Echoing), count, policy)
        try:
            async with asyncio.timeout(60):
                await pool.ready()
                await body(ends)
        finally:
            pool.connections.close()
            await asyncio.gather(*ends.running, return_exceptions=True)
            await ends.fleet.client.close()

    asyncio.run(main())


async def here(uid: int, kind: type[Any] = Echoing) -> Rollout:
    """The trajectory as the controller plays it."""
    return await trajectories(SeededServers(), kind).generate(make_prompt(uid))


def test_they_are_the_controllers_with_all_their_figures(monkeypatch: pytest.MonkeyPatch):
    async def body(ends: Ends) -> None:
        held = await asyncio.gather(*(ends.engine.generate(make_prompt(uid)) for uid in UIDS))
        own = [await here(uid) for uid in UIDS]
        for rollout, mine in zip(held, own, strict=True):
            assert isinstance(rollout, HeldRollout)
            whole = await ends.pool.whole(rollout)
            assert isinstance(whole, Rollout)
            assert everything(whole) == everything(mine)
            assert whole.prompt is rollout.prompt
            same = ("runs", "sizes", "spans", "reward", "finish_reason", "num_tokens", "num_ids")
            for name in (*same, "num_response_tokens", "geometric_logps", "restarts"):
                assert getattr(rollout, name) == getattr(mine, name), name
        columns, others = turn_columns(held), turn_columns(own)
        measured = {"turn_sampling_s_mean", "turn_waiting_s_mean", "environment_s_mean"}
        for name in columns.keys() - measured:
            assert columns[name] == others[name], name
        assert columns["turns_mean"] == 4
        assert ends.fleet.most == 2, "as many turns at once as there are slots"
        assert ends.fleet.prefers.count("") == len(UIDS)
        assert ends.fleet.prefers.count(URL) == 3 * len(UIDS)
        assert len({request.rid for request in ends.servers.requests}) == 4 * len(UIDS)

    drive(body, monkeypatch)


def test_scores_are_of_every_turn(monkeypatch: pytest.MonkeyPatch):
    async def body(ends: Ends) -> None:
        rollout = await ends.engine.generate(make_prompt(3))
        assert isinstance(rollout, HeldRollout)
        scored, shape = await ends.pool.score(ends.fleet.client, rollout, ASK, 600)
        whole = await ends.pool.sample(HeldSample(scored, shape, rollout.reward))
        assert isinstance(whole, Sample)
        assert whole.reward == 2.5
        assert shape.rows == rollout.num_response_tokens
        ids_N = whole.rollout.draws.ids_N
        assert whole.teacher_logp_N.tolist() == (-0.01 * ids_N).astype("float32").tolist()

    drive(body, monkeypatch)


def test_a_turn_that_is_lost_is_sampled_anew_and_what_came_before_stays(
    monkeypatch: pytest.MonkeyPatch,
):
    async def body(ends: Ends) -> None:
        rollout = await ends.engine.generate(make_prompt(3))
        mine = await here(3)
        assert rollout.restarts == 1
        assert rollout.runs == mine.runs  # type: ignore[union-attr]
        first, lost, again, *_ = ends.servers.requests
        assert (lost.seed, list(lost.input_ids)) == (again.seed, list(again.input_ids))
        assert len(first.input_ids) < len(again.input_ids)
        assert lost.rid != again.rid

    drive(body, monkeypatch, loses=[2])


def test_a_trajectory_of_a_lost_worker_begins_anew_at_another(monkeypatch: pytest.MonkeyPatch):
    async def body(ends: Ends) -> None:
        ends.servers.gate.clear()
        sampling = asyncio.ensure_future(ends.engine.generate(make_prompt(3)))
        await until(lambda: bool(ends.servers.requests))
        ends.workers[0]._dealer.close()  # as when it is killed: it says nothing more
        await until(lambda: len(ends.servers.requests) == 2)
        ends.servers.gate.set()
        rollout = await sampling
        assert isinstance(rollout, HeldRollout)
        assert (rollout.worker, rollout.restarts) == ("data worker 1", 1)
        assert rollout.runs == (await here(3)).runs
        assert ends.pool.workers_lost == 1

    drive(body, monkeypatch, count=2)


def test_a_turn_that_is_thrown_away_for_a_weight_sync_is_the_same_again(
    monkeypatch: pytest.MonkeyPatch,
):
    async def body(ends: Ends) -> None:
        ends.servers.gate.clear()
        sampling = asyncio.ensure_future(ends.engine.generate(make_prompt(3)))
        await until(lambda: bool(ends.servers.requests))
        async with ends.hold.held():
            ends.servers.gate.set()
            assert len(ends.servers.requests) == 1
        rollout = await sampling
        assert rollout.restarts == 1
        assert rollout.runs == (await here(3)).runs  # type: ignore[union-attr]
        first, again, *_ = ends.servers.requests
        assert first.seed == again.seed
        assert first.rid != again.rid

    drive(body, monkeypatch, policy="abort")


def test_trajectories_are_shared_out(monkeypatch: pytest.MonkeyPatch):
    async def body(ends: Ends) -> None:
        ends.servers.gate.clear()
        sampling = [asyncio.ensure_future(ends.engine.generate(make_prompt(u))) for u in range(4)]
        await until(lambda: len(ends.servers.requests) == 2)
        assert [worker.trajectories for worker in ends.pool.connections.alive] == [2, 2]
        ends.servers.gate.set()
        await asyncio.gather(*sampling)
        assert [worker.trajectories for worker in ends.pool.connections.alive] == [0, 0]

    drive(body, monkeypatch, count=2)


async def finished(ends: Ends, turns: int) -> Sequence[SampledTurn]:
    """The turns that the controller gets of a trajectory while the next one is sampled."""
    sampling = asyncio.ensure_future(ends.engine.generate(make_prompt(3)))
    await until(lambda: len(ends.servers.requests) == turns)
    ends.servers.gate.clear()
    await until(lambda: len(ends.servers.requests) == turns + 1)
    found = await ends.engine.turns_of(3)
    sampling.cancel()
    with suppress(asyncio.CancelledError):
        await sampling
    await until(lambda: not ends.workers[0]._store._under_way)
    ends.servers.gate.set()
    return found


def test_a_checkpoint_gets_the_finished_turns_and_a_worker_goes_on_from_them(
    monkeypatch: pytest.MonkeyPatch,
):
    async def body(ends: Ends) -> None:
        kept = await finished(ends, 2)
        assert len(kept) == 2
        assert await ends.engine.turns_of(3) == (), "it was given up"
        before = len(ends.servers.requests)
        ends.engine.restore(3, kept)
        rollout = await ends.engine.generate(make_prompt(3))
        assert len(ends.servers.requests) - before == 2
        assert everything(await ends.pool.whole(rollout)) == everything(await here(3))
        assert ends.counts == ResumeCounts(resumed=1)

    drive(body, monkeypatch)


@pytest.mark.parametrize("large", [False, True])
def test_one_that_cannot_be_brought_back_begins_anew(monkeypatch: pytest.MonkeyPatch, large: bool):
    class Changing(Echoing):
        alive = 0

        async def start(self, row: Any) -> str:
            type(self).alive += 1
            return f"{await super().start(row)} {self.alive if not large else ''}"

    async def body(ends: Ends) -> None:
        kept = await finished(ends, 1)
        if large:
            monkeypatch.setattr(played_module, "LARGEST_BYTES", 99)
        ends.engine.restore(3, kept)
        rollout = await ends.engine.generate(make_prompt(3))
        assert isinstance(rollout, HeldRollout)
        assert len(rollout.runs) == 4
        assert ends.counts == ResumeCounts(resumed=1, begun_anew=1)

    drive(body, monkeypatch, played_here(Changing))


def test_one_whose_environment_fails_is_dropped_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    class Failing(Echoing):
        async def step(self, reply: Any) -> TrajectoryEnd:
            raise RuntimeError("spoilt")

    async def body(ends: Ends) -> None:
        with pytest.raises(RolloutRejected) as rejected:
            await ends.engine.generate(make_prompt(3))
        assert rejected.value.reason == ENVIRONMENT_FAILED
        assert "RuntimeError: spoilt" in rejected.value.detail
        store = ends.workers[0]._store
        assert not store._under_way
        assert len(store) == 0

    drive(body, monkeypatch, played_here(Failing))


class AtOnce:
    """Plays two turns at once, as an agent that calls in parallel; ends as `ended` says.

    ended: None, once both are sampled; else what it raises after the first.
    """

    def __init__(self, ended: Exception | None = None) -> None:
        self.ended = ended

    async def play(self, row: EnvironmentRow, sample: TurnSampler) -> Played:
        asked = [[7, 8, 9], [7, 8, 10, 11]]
        turns = [asyncio.ensure_future(sample(ids, 64)) for ids in asked]
        try:
            if self.ended is not None:
                await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
                raise self.ended
            sampled = await asyncio.gather(*turns)
        finally:
            for turn in turns:
                turn.cancel()
        whole = [[*ids, *turn.ids] for ids, turn in zip(asked, sampled, strict=True)]
        runs = [
            SampledRun(n, len(ids), len(all_ids), n)
            for n, (ids, all_ids) in enumerate(zip(asked, whole, strict=True))
        ]
        built = BuiltTrajectory(tuple(np.array(ids, np.int32) for ids in whole), tuple(runs))
        figures = [PlayedTurn(run.num_tokens) for run in runs]
        figures[1] = replace(figures[1], reward=1.0)
        return Played(built, tuple(figures), "done", (), "")


def test_an_agents_parallel_calls_are_sampled_at_once(monkeypatch: pytest.MonkeyPatch):
    async def body(ends: Ends) -> None:
        ends.servers.gate.clear()
        sampling = asyncio.ensure_future(ends.engine.generate(make_prompt(3)))
        await until(lambda: len(ends.servers.requests) == 2)
        assert not await ends.engine.turns_of(3)
        ends.servers.gate.set()
        rollout = await sampling
        assert isinstance(rollout, HeldRollout)
        whole = await ends.pool.whole(rollout)
        turns = RolloutGenerator(playing.config(), ends.servers, 400, "run7", (END,))
        seed = playing.config().run.seed
        own = TrajectoryGenerator(turns, ends.servers, AtOnce(), seed)
        assert everything(whole) == everything(await own.generate(make_prompt(3)))
        assert ends.pool.workers_lost == 0

    drive(body, monkeypatch, AtOnce())


def test_a_trajectory_that_ends_while_a_turn_is_sampled_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its other turn is given up, and the worker goes on."""

    async def body(ends: Ends) -> None:
        ends.servers.held = [2]
        with pytest.raises(RolloutRejected) as rejected:
            await ends.engine.generate(make_prompt(3))
        assert rejected.value.reason == ENVIRONMENT_FAILED
        assert len(ends.servers.requests) == 2
        await until(lambda: ends.fleet.working == 0)
        assert not ends.workers[0]._store._under_way
        assert ends.pool.workers_lost == 0

    failed = EnvironmentFailed(ENVIRONMENT_FAILED, "it hangs up")
    drive(body, monkeypatch, AtOnce(failed))


def test_a_worker_that_tells_of_another_trajectorys_turns_is_lost(
    monkeypatch: pytest.MonkeyPatch,
):
    def other(rollout: Rollout) -> Any:
        return replace_fields(described(rollout), spans=[(5, 0, rollout.num_response_tokens)])

    monkeypatch.setattr("megatron_opd.data_workers.store.described", other)

    async def body(ends: Ends) -> None:
        sampling = asyncio.ensure_future(ends.engine.generate(make_prompt(3)))
        await until(lambda: ends.pool.workers_lost == 1)
        assert ends.pool.connections.refusals.count == 1
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling

    drive(body, monkeypatch)


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110  what is counted has no event
        await asyncio.sleep(0.001)
