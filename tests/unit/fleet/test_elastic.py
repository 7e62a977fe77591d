"""Servers join and leave a run: what is taken in, what drains, and what is refused in one line."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opd.errors import UserError
from megatron_opd.fleet.elastic import Drop, Elastic
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerRefused, ServerUnreachable
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import ServerInfo
from tests.support.bridge_replies import REQUEST
from tests.support.config_files import minimal

A, B, C, T = (f"http://{name}:1" for name in "abct")


class Client(ServerClient):
    """A server that samples for `takes_s`; rewound says that it has its checkpoint again."""

    def __init__(self, url: str, version: int = 0) -> None:
        super().__init__(url, timeout_s=1)
        self.know(replace(self.known, version=version))
        self.takes_s, self.rewound, self.failure = 1.0, False, None

    async def alive(self) -> bool:
        await asyncio.sleep(0)
        return True

    async def generate(self, request: Any) -> Any:
        await asyncio.sleep(self.takes_s)
        return SimpleNamespace(output_ids_T=range(5), url=self.url)

    async def rewind(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.rewound = True


class Run:
    """Two students, one of them started here (A), and a teacher."""

    def __init__(self, **sections: Any) -> None:
        hold = {"schedule": {"type": "controlled"}}
        self.config = minimal(**(hold | {"cluster": {"drain_s": 30.0}} | sections))
        self.clients = {url: Client(url, version=3) for url in (A, B, C, T)}
        self.fleets = {
            "student": Fleet([self.clients[A], self.clients[B]]),
            "teacher": Fleet([self.clients[T]]),
        }
        self.said: list[str] = []
        self.here, self.ended = {A}, []
        self.parted: str | None = None
        self.refusal: Exception | None = None
        processes: Any = SimpleNamespace(watched_server=lambda url: [], discard=lambda url: None)
        processes.remove = self.remove
        take_in: Any = self.take_in
        self.supervisor = Supervisor(self.config, self.fleets, processes, take_in, self.said.append)
        self.elastic = Elastic(
            self.config,
            self.fleets,
            self.supervisor,
            processes,
            take_in,
            self.remove_server,
            self.said.append,
        )

    async def remove(self, url: str) -> bool:
        self.ended += [url] * (url in self.here)
        return url in self.here

    async def take_in(self, role: str, url: str) -> ServerClient:
        await asyncio.sleep(1)
        if self.refusal is not None:
            raise self.refusal
        info = ServerInfo(url, "m", 50, 64, 1, 1, 0, "bfloat16", 100, False)
        self.fleets[role].add(self.clients[url], info)
        return self.clients[url]

    async def remove_server(self, url: str, drop: Drop) -> str | None:
        drop()
        return self.parted

    def states(self) -> dict[str, str]:
        return {row.url: row.state for row in self.elastic.rows()}

    def watch(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            async with self.supervisor.watching():
                await scenario()

        run_virtual(run())


async def refusal(change: Awaitable[str]) -> str:
    with pytest.raises(UserError) as caught:
        await change
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_student_joins_with_the_next_weight_sync_and_a_teacher_at_once():
    run = Run()

    async def scenario() -> None:
        students, teachers = run.fleets["student"], run.fleets["teacher"]
        await students.let_in()  # weight syncs have begun
        said = await run.elastic.add("student", f" {C}/ ")
        assert said.endswith("is added: it samples once the next weight sync gave it weights")
        assert (students.urls, run.states()[C]) == ((A, B), "waiting for weights")
        await students.let_in()
        assert students.urls == (A, B, C)
        run.clients["http://u:1"] = Client("http://u:1")
        assert (await run.elastic.add("teacher", "http://u:1")).endswith("is added: it serves")
        assert teachers.urls == (T, "http://u:1")
        assert run.elastic.added == [C, "http://u:1"]

    run.watch(scenario)


def test_a_server_that_leaves_finishes_its_requests_and_is_as_it_was_when_it_started():
    run = Run()

    async def scenario() -> None:
        fleet = run.fleets["student"]
        work = [asyncio.create_task(fleet.generate(REQUEST)) for _ in range(4)]
        await asyncio.sleep(0)
        leaving = asyncio.create_task(run.elastic.remove(B))
        await asyncio.sleep(0.5)
        assert run.states()[B] == "draining"
        said = await leaving
        assert "it has its checkpoint's weights again, another run may use it" in said
        assert sorted(reply.url for reply in await asyncio.gather(*work)) == [A, A, B, B]
        assert (fleet.urls, run.clients[B].rewound) == ((A,), True)
        assert (await fleet.generate(REQUEST)).url == A
        assert run.elastic.removed == [B]
        assert f"student server {B} drains: 2 requests in flight" in run.said
        assert (run.supervisor.roles(B), run.supervisor.lost) == ((), {})
        assert (await run.elastic.add("student", B)).startswith(f"student server {B} is added")

    run.watch(scenario)


def test_a_server_of_this_machine_is_ended_and_what_it_cannot_finish_is_sent_again():
    run = Run()

    async def scenario() -> None:
        fleet, clock = run.fleets["student"], asyncio.get_running_loop().time
        run.clients[A].takes_s = 1000.0
        work = [asyncio.create_task(fleet.generate(REQUEST)) for _ in range(2)]
        await asyncio.sleep(0)
        began_s = clock()
        said = await run.elastic.remove(A)
        assert clock() - began_s == pytest.approx(30.0)
        assert said == f"student server {A} is removed: it is ended; 1 requests were sent again"
        assert (run.ended, run.clients[A].rewound) == ([A], False)
        done = await asyncio.gather(*work, return_exceptions=True)
        (cut,) = [error for error in done if isinstance(error, ServerUnreachable)]
        assert cut.taken_out
        assert fleet.restarted == 1

    run.watch(scenario)


@pytest.mark.parametrize("parted", [None, "close: no answer within 3 s"])
def test_a_server_that_was_not_released_must_be_restarted(parted: str | None):
    run = Run()
    run.parted = parted
    if parted is None:
        run.clients[B].failure = ServerRefused(B, "/update_weights_from_disk", 400, "no such file")

    async def scenario() -> None:
        said = await run.elastic.remove(B)
        assert "restart it before another run uses it, as it was not released: " in said
        assert (parted or "no such file") in said

    run.watch(scenario)


def test_a_server_that_was_lost_can_be_removed_too():
    run = Run()

    async def scenario() -> None:
        assert run.supervisor.lose(B, "it took no weights")
        assert run.states()[B] == "lost"
        await run.elastic.remove(B)
        await asyncio.sleep(1000)
        assert list(run.states()) == [A, T], "it does not come back"

    run.watch(scenario)


def test_what_cannot_be_done_is_one_line():
    run = Run()

    async def scenario() -> None:
        add, remove = run.elastic.add, run.elastic.remove
        assert await refusal(add("student", A)) == f"{A} is a student server of this run already"
        assert await refusal(add("teacher", B)) == f"{B} is a student server of this run already"
        assert "http(s)://HOST:PORT, got 'ftp://x'" in await refusal(add("student", "ftp://x"))
        assert "must be one of student, teacher, got 'x'" in await refusal(add("x", C))
        assert f"{C} is no server of this run" in await refusal(remove(C))
        assert "fewer servers than teacher.min_servers = 1" in await refusal(remove(T))
        run.refusal = ServerUnreachable(C, "/server_info", "refused", sent=False)
        cause = f"{C} cannot be added: {C}/server_info: no answer (refused)"
        assert await refusal(add("student", C)) == cause
        run.refusal = UserError(f"{C} serves another model")
        assert await refusal(add("student", C)) == f"{C} serves another model"
        assert run.elastic.added == run.elastic.removed == []

    run.watch(scenario)


def test_one_change_of_a_server_at_a_time():
    run = Run()

    async def scenario() -> None:
        adding = asyncio.create_task(run.elastic.add("student", C))
        await asyncio.sleep(0.1)
        assert await refusal(run.elastic.add("student", C)) == f"{C} is being added already"
        await adding
        run.clients[C].takes_s = 10.0
        run.fleets["student"].drop(A)
        run.fleets["student"].drop(B)
        work = asyncio.create_task(run.fleets["student"].generate(REQUEST))
        await asyncio.sleep(0.1)
        leaving = asyncio.create_task(run.elastic.remove(C))
        await asyncio.sleep(0.1)
        assert await refusal(run.elastic.remove(C)) == f"{C} is being removed already"
        await leaving
        await work

    run.watch(scenario)


def test_a_deterministic_run_refuses_by_name():
    run = Run(run={"deterministic": True})

    async def scenario() -> None:
        for change in (run.elastic.add("student", C), run.elastic.remove(B)):
            assert "needs run.deterministic: false, got true" in await refusal(change)
        assert len(run.elastic.rows()) == 3

    run.watch(scenario)


def test_the_listing_tells_the_speed_since_the_last_one():
    run = Run()

    async def scenario() -> None:
        fleet = run.fleets["student"]
        run.elastic.rows()
        await asyncio.gather(*(fleet.generate(REQUEST) for _ in range(4)))
        await asyncio.sleep(4)
        speeds = {row.url: row.tokens_per_s for row in run.elastic.rows()}
        assert speeds == {A: pytest.approx(2.0), B: pytest.approx(2.0), T: 0.0}
        await asyncio.sleep(5)
        (row,) = [row for row in run.elastic.rows() if row.url == A]
        assert (row.version, row.in_flight, row.restarts, row.tokens_per_s) == (3, 0, 0, 0.0)

    run.watch(scenario)
