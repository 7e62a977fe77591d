"""Servers that are lost come back, within their budget; a run ends when too few are left."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_opd.errors import UserError
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.launch.health import EngineLost, WatchedProcess
from megatron_opd.records.types import VersionSpan
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.claims import ClaimRefused
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerDied, ServerUnreachable
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import ScoreReply, ScoreRequest, ServerInfo
from tests.support.config_files import minimal
from tests.support.fakes import make_prompt, make_rollout

A, B, C, D, T = (f"http://{name}:1" for name in "abcdt")


class Machine:
    """Servers and their processes. exits: the exit code of each that ended.

    refuses: how often each cannot be started. elsewhere: those that are no processes of ours.
    moves: where each is started again. claimed: those that are another run's by now. starting:
    those that answer and have not started yet.
    """

    def __init__(self, **student: Any) -> None:
        self.exits: dict[str, int] = {}
        self.refuses: dict[str, int] = {}
        self.moves: dict[str, str] = {}
        self.elsewhere: set[str] = set()
        self.silent: set[str] = set()
        self.claimed: set[str] = set()
        self.starting: set[str] = set()
        self.log: list[tuple[float, str]] = []
        self.said: list[str] = []
        run, urls = student.pop("run", {}), student.pop("servers", (A, B, C))
        self.config = minimal(
            student={"model": "s", "startup_timeout_s": 60.0} | student,
            run=run,
            schedule={"type": "controlled"},
        )
        self.fleets = {"student": self.fleet(*urls), "teacher": self.fleet(T)}
        processes: Any = SimpleNamespace(
            discard=lambda url: self.note(f"discard {url}"),
            put_another=self.put_another,
            start_one=self.start_one,
            watched_server=self.watched,
        )
        self.supervisor = Supervisor(
            self.config, self.fleets, processes, self.take_in, self.said.append
        )

    def note(self, what: str) -> None:
        self.log.append((asyncio.get_running_loop().time(), what))

    def fleet(self, *urls: str) -> Fleet:
        return Fleet([self.client(url) for url in urls])

    def client(self, url: str) -> ServerClient:
        client = ServerClient(url, timeout_s=1)

        async def alive() -> bool:
            await asyncio.sleep(0)
            if url in self.claimed:
                raise ClaimRefused(f"{url}: run /b writes its weights into this server")
            return url not in self.silent

        async def has_started() -> bool:
            return url not in self.starting

        client.alive = alive  # type: ignore[method-assign]
        client.has_started = has_started  # type: ignore[method-assign]
        return client

    def watched(self, url: str) -> list[WatchedProcess]:
        if url in self.elsewhere:
            return []
        return [WatchedProcess(f"server {url}", lambda: self.exits.get(url))]

    async def put_another(self, url: str) -> str:
        return self.moves.pop(url, url)

    async def start_one(self, url: str, timeout_s: float) -> None:
        self.note(f"start {url}")
        await asyncio.sleep(10)
        if self.refuses.get(url, 0) > 0:
            self.refuses[url] -= 1
            raise ServerDied(f"{url} ended with status 1")
        self.exits.pop(url, None)

    async def take_in(self, role: str, url: str) -> ServerClient:
        info = ServerInfo(url, "m", 50, 64, 1, 1, 0, "bfloat16", 100, False)
        client = self.client(url)
        self.fleets[role].add(client, info)
        return client

    def watch(self, scenario: Callable[[], Awaitable[None]]) -> Exception | None:
        """Run `scenario` while the supervisor watches; what it says ended the run."""

        async def run() -> Exception | None:
            async with self.supervisor.watching():
                failed = asyncio.ensure_future(self.supervisor.failed())
                await scenario()
                await asyncio.sleep(0)
                error = failed.result() if failed.done() else None
                failed.cancel()
                return error

        return run_virtual(run())


def starts(machine: Machine, url: str) -> list[float]:
    return [at_s for at_s, what in machine.log if what == f"start {url}"]


def test_a_server_that_ended_is_started_again_and_taken_in():
    machine = Machine()

    async def scenario() -> None:
        await asyncio.sleep(5)
        machine.exits[B] = -9
        await asyncio.sleep(1)
        assert machine.fleets["student"].urls == (A, C)
        assert list(machine.supervisor.lost) == [B]
        await asyncio.sleep(12)
        assert machine.fleets["student"].urls == (A, C, B)

    assert machine.watch(scenario) is None
    assert (machine.supervisor.lost, machine.supervisor.restarted) == ({}, {B: 1})
    lost, back = machine.said
    ended = f"server {B} ended with signal 9"
    assert lost == f"student server {B} is lost, the run goes on with 2: {ended}"
    assert back == f"student server {B} is back after 11 s"
    assert [what for _, what in machine.log] == [f"discard {B}", f"start {B}"]


def test_a_server_that_is_another_run_s_by_now_ends_this_run():
    """It does not go on with the others: what it sent meanwhile may be of the other's weights."""
    machine = Machine()

    async def scenario() -> None:
        await asyncio.sleep(5)
        machine.claimed.add(B)
        await asyncio.sleep(4)

    error = machine.watch(scenario)
    assert isinstance(error, ClaimRefused)
    assert str(error) == f"{B}: run /b writes its weights into this server"
    assert machine.log == []


def test_a_server_whose_requests_make_no_progress_is_lost_though_it_says_that_it_is_alive():
    """Before: it was asked again and again, until the run ended."""
    machine = Machine()

    async def silent(client: ServerClient) -> None:
        raise ServerUnreachable(client.url, "/generate", "", sent=True) from TimeoutError()

    async def scenario() -> None:
        await asyncio.sleep(5)
        fleet = machine.fleets["teacher"]
        with pytest.raises(ServerUnreachable):
            await fleet.ask(silent, len)
        await asyncio.sleep(1)
        assert fleet.urls == ()
        assert (fleet.restarted, fleet.timed_out) == (1, 1)
        await asyncio.sleep(30)
        assert fleet.urls == (T,)

    assert machine.watch(scenario) is None
    lost = f"the run goes on with 0: teacher server {T} hangs: requests there make no progress"
    assert lost in machine.said[0]


def test_a_deterministic_run_ends_where_a_server_hangs():
    machine = Machine(run={"deterministic": True})

    async def silent(client: ServerClient) -> None:
        raise ServerUnreachable(client.url, "/generate", "", sent=True) from TimeoutError()

    async def scenario() -> None:
        await asyncio.sleep(1)
        with pytest.raises(ServerUnreachable):
            await machine.fleets["student"].ask(silent, len)
        await asyncio.sleep(1)

    error = machine.watch(scenario)
    assert isinstance(error, EngineLost)
    assert "hangs" in str(error)


def test_nothing_is_dropped_while_a_lone_teacher_is_started_again():
    """It is killed while it scores, and again: every sample waits for it."""
    machine = Machine()
    scored: list[float] = []

    async def score(client: ServerClient, request: ScoreRequest) -> ScoreReply:
        for _ in range(40):
            await asyncio.sleep(0.1)
            if T in machine.exits:
                raise ServerUnreachable(T, "/generate", "reset", sent=True)
        return ScoreReply(np.full(len(request.ids_N), -0.5, np.float32))

    async def scenario() -> None:
        fleet = machine.fleets["teacher"]
        scorer = FleetScorer(minimal(scoring={"attempts": 1}), {"teacher": fleet}, 50, "run")
        samples = [make_rollout(make_prompt(i), (VersionSpan(0, 0, 3),)) for i in range(5)]
        work = [asyncio.ensure_future(scorer.score(rollout)) for rollout in samples]
        for _ in range(3):
            await asyncio.sleep(2)
            machine.exits[T] = -9
            await asyncio.sleep(12.5)
        scored.extend([sample.teacher_logp_N[0] for sample in await asyncio.gather(*work)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerClient, "score", score)
        assert machine.watch(scenario) is None
    assert scored == [-0.5] * 5
    assert machine.supervisor.restarted[T] >= 2


def test_a_server_may_come_back_at_another_address():
    machine = Machine()
    machine.moves[B] = D

    async def scenario() -> None:
        machine.exits[B] = -9
        machine.refuses[D] = 1  # the first start there fails
        await asyncio.sleep(30)
        assert machine.fleets["student"].urls == (A, C, D)
        machine.exits[D] = 1  # the one there is watched from now on
        await asyncio.sleep(1)
        assert machine.fleets["student"].urls == (A, C)
        assert list(machine.supervisor.lost) == [D]
        assert machine.supervisor.lose(D, "known already")

    assert machine.watch(scenario) is None
    assert starts(machine, B) == []
    assert machine.supervisor.restarted == {D: 1}


def test_a_role_s_only_server_comes_back_too():
    machine = Machine()

    async def scenario() -> None:
        machine.exits[T] = 1
        await asyncio.sleep(2)
        assert machine.fleets["teacher"].urls == ()
        await asyncio.sleep(15)
        assert machine.fleets["teacher"].urls == (T,)

    assert machine.watch(scenario) is None


def test_waits_grow_and_the_budget_ends():
    machine = Machine(max_restarts=3)
    machine.refuses[B] = 2

    async def scenario() -> None:
        machine.exits[B] = 1
        await asyncio.sleep(60)
        assert machine.fleets["student"].urls == (A, C, B)
        machine.exits[B] = 1
        await asyncio.sleep(200)
        assert machine.fleets["student"].urls == (A, C)

    assert machine.watch(scenario) is None
    first, second, third = starts(machine, B)
    assert (round(second - first), round(third - second)) == (12, 14)
    assert list(machine.supervisor.lost) == [B]
    assert f"student server {B} does not come back: {B} ended with status 1" in machine.said


def test_what_was_an_hour_ago_does_not_count():
    machine = Machine(max_restarts=1, min_servers=3)

    async def scenario() -> None:
        for _ in range(3):
            machine.exits[B] = 1
            await asyncio.sleep(20)
            assert set(machine.fleets["student"].urls) == {A, B, C}
            await asyncio.sleep(3600)

    assert machine.watch(scenario) is None
    assert machine.supervisor.restarted == {B: 3}


@pytest.mark.parametrize("min_servers", [2, 3])
def test_the_run_ends_once_too_few_can_be_left(min_servers: int):
    """Servers that are being started again count until their budget is spent."""
    machine = Machine(min_servers=min_servers, max_restarts=1)
    machine.refuses = {B: 9, C: 9}

    async def scenario() -> None:
        machine.exits[B] = 1
        await asyncio.sleep(5)
        assert machine.fleets["student"].urls == (A, C)
        await asyncio.sleep(60)
        machine.exits[C] = 1
        await asyncio.sleep(60)

    error = machine.watch(scenario)
    assert isinstance(error, EngineLost)
    victim = B if min_servers == 3 else C
    assert str(error) == f"student server {victim} is lost: server {victim} ended with exit code 1"


@pytest.mark.parametrize(("deterministic", "max_restarts"), [(True, 3), (False, 0)])
def test_a_server_that_the_run_needs_ends_it(deterministic: bool, max_restarts: int):
    machine = Machine(
        run={"deterministic": deterministic}, max_restarts=max_restarts, min_servers=3
    )

    async def scenario() -> None:
        assert not machine.supervisor.lose(A, "it took no weights")
        machine.exits[A] = 3
        await asyncio.sleep(2)

    error = machine.watch(scenario)
    assert str(error) == f"server {A} ended with exit code 3"
    assert machine.fleets["student"].urls == (A, B, C)
    assert (machine.said, machine.log) == ([], [])


def test_who_else_notices_first_may_say_so():
    machine = Machine()

    async def scenario() -> None:
        await asyncio.sleep(1)
        assert machine.supervisor.lose(C, "it took no weights")
        assert machine.supervisor.lose(C, "whoever notices it next")
        assert machine.fleets["student"].urls == (A, B)
        assert machine.supervisor.lost == {C: "it took no weights"}
        await asyncio.sleep(15)
        assert machine.fleets["student"].urls == (A, B, C)

    assert machine.watch(scenario) is None
    assert starts(machine, C) == [pytest.approx(2, abs=0.1)]


def test_a_server_elsewhere_is_awaited():
    machine = Machine()
    machine.elsewhere = {B}

    async def scenario() -> None:
        machine.silent.add(B)
        await asyncio.sleep(30)
        assert machine.fleets["student"].urls == (A, C)
        machine.silent.clear()
        await asyncio.sleep(3)
        assert machine.fleets["student"].urls == (A, C, B)

    assert machine.watch(scenario) is None
    assert starts(machine, B) == []


def test_a_server_elsewhere_that_answers_is_taken_in_once_it_has_started():
    """Before, it would refuse what it is asked then, which would count as a start in vain."""
    machine = Machine(max_restarts=1)
    machine.elsewhere = {B}

    async def scenario() -> None:
        machine.silent.add(B)
        await asyncio.sleep(30)
        machine.silent.clear()
        machine.starting.add(B)
        await asyncio.sleep(20)
        assert machine.fleets["student"].urls == (A, C)
        machine.starting.clear()
        await asyncio.sleep(3)
        assert machine.fleets["student"].urls == (A, C, B)

    assert machine.watch(scenario) is None


def test_a_server_elsewhere_that_stays_away_is_given_up():
    machine = Machine(min_servers=3, max_restarts=1)
    machine.elsewhere = {B}

    async def scenario() -> None:
        machine.silent.add(B)
        await asyncio.sleep(120)

    error = machine.watch(scenario)
    assert str(error) == (
        f"student server {B} is lost: student server {B} did not answer 6 times in a row"
    )
    assert (
        machine.said[-1] == f"student server {B} does not come back: {B} did not answer within 60 s"
    )


def test_what_comes_back_as_another_model_is_not_taken_in():
    machine = Machine(max_restarts=1, min_servers=3)

    async def refuse(role: str, url: str) -> None:
        raise UserError(f"{role}: {url} must serve another model")

    machine.supervisor._take_in = refuse

    async def scenario() -> None:
        machine.exits[B] = 1
        await asyncio.sleep(30)

    assert isinstance(machine.watch(scenario), EngineLost)
    assert machine.fleets["student"].urls == (A, C)


def test_a_server_that_was_added_is_watched_and_awaited_like_any_other():
    machine = Machine(servers=(A,), max_restarts=1, min_servers=2)
    machine.elsewhere = {B}

    async def scenario() -> None:
        await machine.take_in("student", B)
        machine.supervisor.keep("student", B, machine.fleets["student"].client(B))
        machine.silent.add(B)
        await asyncio.sleep(30)
        assert machine.fleets["student"].urls == (A,)
        machine.silent.clear()
        await asyncio.sleep(5)
        assert machine.fleets["student"].urls == (A, B)
        machine.silent.add(B)
        await asyncio.sleep(100)

    error = machine.watch(scenario)
    assert isinstance(error, EngineLost), "its loss ends a run that needs it by now"
    assert str(error) == f"student server {B} did not answer 6 times in a row"


def test_a_server_that_was_released_never_comes_back():
    machine = Machine()

    async def scenario() -> None:
        machine.supervisor.release(B)
        machine.exits[B] = 1
        await asyncio.sleep(60)
        assert machine.fleets["student"].urls == (A, C)
        await machine.supervisor.forget(B)
        assert (machine.supervisor.lost, machine.supervisor.roles(B)) == ({}, ())

    assert machine.watch(scenario) is None
    assert starts(machine, B) == []


def test_only_servers_that_the_run_can_do_without_are_released():
    """Servers that are being started again count, those that are released already do not."""
    machine = Machine(min_servers=2)

    async def scenario() -> None:
        machine.exits[C] = 1
        await asyncio.sleep(2)
        machine.supervisor.release(B)
        with pytest.raises(UserError) as caught:
            machine.supervisor.release(A)
        assert str(caught.value) == (
            f"{A} cannot be removed: student would have fewer servers than "
            "student.min_servers = 2; add another one first"
        )
        with pytest.raises(UserError, match=f"^{T} cannot be removed: teacher would have"):
            machine.supervisor.release(T)

    assert machine.watch(scenario) is None
