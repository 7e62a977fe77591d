"""A fleet that loses servers: their work goes elsewhere, and what failed is known by server."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from aiohttp import web

from sglang_bridge import wire
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerUnreachable, WeightSyncFailed
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import ServerInfo
from sglang_bridge.retry import Backoff, is_lost_connection, retried
from tests.support.bridge_replies import REQUEST, FakeServer, answering, rollout_reply

FINE = {"success": True}


def client_of(server: FakeServer) -> ServerClient:
    return ServerClient(server.url, timeout_s=20, backoff=Backoff(1))


class Silent:
    """A handler that answers nothing, until the test is over."""

    def __init__(self) -> None:
        self.asked, self.over = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.asked.set()
        await self.over.wait()
        return web.json_response({})


def with_two(
    one: dict, two: dict, scenario: Callable[[Fleet, FakeServer, FakeServer], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with FakeServer(one) as first, FakeServer(two) as second:
            fleet = Fleet([client_of(first), client_of(second)])
            try:
                await scenario(fleet, first, second)
            finally:
                await fleet.close()
                for handler in (*one.values(), *two.values()):
                    if isinstance(handler, Silent):
                        handler.over.set()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_what_a_dropped_server_works_on_goes_to_another_one():
    silent = Silent()

    async def scenario(fleet: Fleet, hung: FakeServer, other: FakeServer) -> None:
        work = asyncio.create_task(
            retried(lambda _: fleet.generate(REQUEST), Backoff(2), is_lost_connection)
        )
        await silent.asked.wait()
        assert (fleet.in_flight, other.seen) == (1, [])
        fleet.drop(hung.url)
        reply = await work
        assert reply.url == other.url
        assert fleet.urls == (other.url,)
        assert fleet.in_flight == 0
        with pytest.raises(ValueError, match=f"^{hung.url} is no server of this fleet$"):
            fleet.drop(hung.url)
        await fleet.generate(REQUEST)
        assert len(hung.seen) == 1

    with_two({wire.WORK_ROUTE: silent}, {wire.WORK_ROUTE: answering(rollout_reply())}, scenario)


def test_a_dropped_server_is_no_timeout():
    """A request that ran out of time is never repeated; one whose server was lost is."""
    silent = Silent()

    async def scenario(fleet: Fleet, hung: FakeServer, other: FakeServer) -> None:
        work = asyncio.create_task(fleet.generate(REQUEST))
        await silent.asked.wait()
        fleet.drop(hung.url)
        with pytest.raises(ServerUnreachable, match="taken out") as caught:
            await work
        assert is_lost_connection(caught.value)

    with_two({wire.WORK_ROUTE: silent}, {}, scenario)


@pytest.mark.parametrize("limit_s", [None, 20.0])
def test_a_step_for_a_server_that_is_taken_out_ends_and_is_not_repeated(limit_s: float | None):
    """What comes back at its address is another process, which was not asked."""

    async def scenario(fleet: Fleet, lost: FakeServer, other: FakeServer) -> None:
        steps = fleet.pause() if limit_s is None else fleet.abandon_weight_update(limit_s)
        step = asyncio.create_task(steps)
        await silent.asked.wait()
        fleet.drop(lost.url)
        if limit_s is None:
            with pytest.raises(WeightSyncFailed, match="it was taken out") as caught:
                await step
            assert caught.value.servers == {lost.url}
        else:
            assert await step == {lost.url: f"{lost.url}: no answer (it was taken out)"}
        assert lost.seen == ["/pause_generation"]
        await fleet.pause()
        assert lost.seen == ["/pause_generation"]

    silent, fine = Silent(), answering(rank_answers())
    routes = ("/pause_generation", "/weights_checker", "/end_weight_update")
    with_two({"/pause_generation": silent}, dict.fromkeys(routes, fine), scenario)


def rank_answers(**said: str) -> dict:
    return {"ranks": [{"checksums": said, "parallelism_info": []}]}


@pytest.mark.parametrize(
    ("reply", "at_fault"),
    [
        (answering(rank_answers(**{wire.ERROR: "no room"})), True),
        (answering(rank_answers(**{wire.ERROR: "left", wire.PEER_LOST: ""})), False),
        (answering({"message": "no"}, 400), True),
    ],
)
def test_who_is_at_fault_is_known(reply: Callable, at_fault: bool):
    """A rank that the learner left has done nothing wrong."""

    async def scenario(fleet: Fleet, one: FakeServer, two: FakeServer) -> None:
        with pytest.raises(WeightSyncFailed) as caught:
            await fleet.receive_weights("group")
        assert caught.value.servers == ({two.url} if at_fault else set())
        assert two.url in str(caught.value)

    path = "/weights_checker"
    with_two({path: answering(rank_answers())}, {path: reply}, scenario)


def test_servers_abandon_a_weight_update_and_those_that_do_not_are_named():
    pause, memory, end = "/pause_generation", "/weights_checker", "/end_weight_update"
    # nothing was open there
    paused = {pause: answering(FINE), memory: answering(rank_answers(**{wire.FREED: ""}))}
    well = {**paused, end: answering({"success": False}, 400)}
    for bad in ({pause: Silent()}, {**paused, end: answering({}, 500)}):

        async def scenario(fleet: Fleet, one: FakeServer, two: FakeServer) -> None:
            gone = await fleet.abandon_weight_update(0.5)
            assert list(gone) == [two.url]
            assert "within 0.5 s" in gone[two.url] or "HTTP 500" in gone[two.url]
            assert one.seen == [pause, memory, end]

        with_two(well, bad, scenario)


def test_a_group_that_a_server_is_not_in_is_left():
    path = "/destroy_weights_update_group"

    async def scenario(fleet: Fleet, one: FakeServer, two: FakeServer) -> None:
        await fleet.destroy_weights_group("never joined")
        assert one.seen == two.seen == [path]

    missing = answering({"message": "The group to be destroyed does not exist."}, 400)
    with_two({path: answering(FINE)}, {path: missing}, scenario)


def test_a_server_added_while_the_first_weights_are_synced_waits():
    """It is in no group of that weight sync, and would sample from older weights afterwards."""

    async def run() -> None:
        fleet = Fleet([ServerClient("http://a:1", timeout_s=1)])
        info = ServerInfo("http://b:1", "m", 50, 64, 1, 1, 0, "float32", 100, False)
        early = replace(info, url="http://early:1")
        fleet.add(ServerClient(early.url, timeout_s=1), early)
        assert fleet.urls == ("http://a:1", early.url), "the weights are still those of its start"
        await fleet.let_in()
        fleet.add(ServerClient(info.url, timeout_s=1), info)
        assert fleet.urls == ("http://a:1", early.url)
        await fleet.let_in()
        assert fleet.urls == ("http://a:1", early.url, info.url)
        await fleet.close()

    asyncio.run(run())


def test_tokens_are_counted_by_server():
    async def scenario(fleet: Fleet, one: FakeServer, two: FakeServer) -> None:
        for _ in range(3):
            await fleet.generate(REQUEST)
        found = {state.url: (state.tokens, state.in_flight) for state in fleet.servers()}
        assert sum(tokens for tokens, _ in found.values()) == 3 * 3
        assert {tokens for tokens, _ in found.values()} <= {0, 3, 6, 9}
        assert {work for _, work in found.values()} == {0}

    fine = {wire.WORK_ROUTE: answering(rollout_reply())}
    with_two(fine, fine, scenario)


class Ranks:
    """Answers an action of the plugin as the replies say, in turn; the last one from then on."""

    def __init__(self, *replies: dict) -> None:
        self.replies, self.asked = list(replies), []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((await request.json())["action"])
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return web.json_response(reply)


def test_memory_is_released_once_every_server_is_idle():
    """What a server frees is what all of its ranks free."""
    path, release = "/weights_checker", "bridge_release_memory kv_cache,weights"
    both = rank_answers(**{wire.FREED: "kv_cache,weights"})["ranks"]
    one = Ranks(rank_answers(**{wire.PENDING: ""}), {"ranks": both * 2})
    two = Ranks({"ranks": [*both, *rank_answers(**{wire.FREED: "kv_cache"})["ranks"]]})

    async def scenario(fleet: Fleet, first: FakeServer, second: FakeServer) -> None:
        assert await fleet.release_memory() == {
            first.url: {"kv_cache", "weights"},
            second.url: {"kv_cache"},
        }
        await fleet.resume_memory(["weights"])
        assert await fleet.restore_memory([second.url, "http://other:1"], 5) == {}

    with_two({path: one}, {path: two}, scenario)
    resumed = "bridge_resume_memory weights"
    assert one.asked == [release, release, resumed]
    assert two.asked == [release, resumed, "bridge_resume_memory kv_cache,weights"]


def test_servers_that_do_not_take_back_their_memory_are_named():
    path = "/weights_checker"
    nothing = rank_answers(**{wire.FREED: ""})

    async def scenario(fleet: Fleet, one: FakeServer, two: FakeServer) -> None:
        found = await fleet.restore_memory(fleet.urls, 0.5)
        assert found == {two.url: "no answer within 0.5 s"}

    with_two({path: Ranks(nothing)}, {path: Silent()}, scenario)
