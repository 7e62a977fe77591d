"""Ranks take samples from data workers over real sockets, and know soon when they cannot."""

import asyncio
import socket as sockets
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opd.data_workers import data_client as client_module
from megatron_opd.data_workers.data_client import TRIES, CannotFetch, DataClient
from megatron_opd.transport.samples import FRAMES
from megatron_opd.wire.keys import RankKeys, RunKeys
from tests.support.cutting_proxy import CuttingProxy
from tests.support.data_servers import (
    LIMIT_S,
    SOON_S,
    A,
    B,
    RunningServer,
    drive,
    fetch,
    frames_with,
)
from tests.support.wire import KEYS


def test_a_share_is_taken_from_all_workers_and_then_the_next(client: DataClient):
    async def body(servers: list[RunningServer]) -> None:
        a, b = (server.address for server in servers)
        assert await fetch(client, {a: ["a-3", "a-1"], b: ["b-1"]}) == {
            **{key: A[key] for key in ("a-1", "a-3")},
            **B,
        }
        assert await fetch(client, {a: ["a-2"]}) == {"a-2": A["a-2"]}
        assert await fetch(client, {b: ["b-1"]}) == B
        assert client._connections.keys() == {b}, "others are not asked for now"
        assert await fetch(client, {}) == {}
        assert servers[0].asked == ["a-1", "a-3", "a-2"]

    drive(body, A, B)


@pytest.mark.parametrize("missing", ["gone", "malformed"])
def test_what_is_not_held_is_told_at_once_and_confuses_no_later_share(
    client: DataClient, missing: str
):
    async def body(servers: list[RunningServer]) -> None:
        a, b = (server.address for server in servers)
        for _ in range(3):
            # the answers to the rest are on their way when it is known
            began_s = time.monotonic()
            with pytest.raises(CannotFetch, match=f"^{a} does not hold sample {missing}$"):
                await fetch(client, {a: [missing, "a-1", "a-3"], b: ["b-1"]})
            assert time.monotonic() - began_s < SOON_S
            servers[0].held["a-1"] = frames_with(b"newer")
            assert await fetch(client, {a: ["a-1"], b: ["b-1"]}) == {
                "a-1": frames_with(b"newer"),
                **B,
            }

    drive(body, A, B)


def test_a_worker_that_is_gone_is_noticed_long_before_the_limit(client: DataClient):
    async def body(servers: list[RunningServer]) -> None:
        a, b = servers
        await fetch(client, {a.address: ["a-1"], b.address: ["b-1"]})
        await a.end()
        began_s = time.monotonic()
        gone = f"^{a.address} is out of reach: {TRIES} connections were refused or broke$"
        with pytest.raises(CannotFetch, match=gone):
            await fetch(client, {a.address: ["a-2"], b.address: ["b-1"]})
        with pytest.raises(CannotFetch, match=gone):
            await fetch(client, {a.address: ["a-2"]})
        assert time.monotonic() - began_s < SOON_S
        assert await fetch(client, {b.address: ["b-1"]}) == B

    drive(body, A, B)


def test_a_worker_that_ends_while_it_gives_is_noticed(client: DataClient):
    async def body(servers: list[RunningServer]) -> None:
        (server,) = servers

        def ends(key: str) -> list[bytes]:
            raise RuntimeError("the worker's process ends")

        server.data_server._frames = ends
        taken = asyncio.ensure_future(fetch(client, {server.address: ["a-1"]}))
        with pytest.raises(RuntimeError, match="process ends"):
            await server.task
        server.data_server.close()
        with pytest.raises(CannotFetch, match="out of reach"):
            await taken

    drive(body, A)


def test_a_worker_that_is_silent_costs_the_limit_and_no_more(client: DataClient):
    async def body(servers: list[RunningServer]) -> None:
        servers[0].task.cancel()  # connections are not answered any more
        with pytest.raises(CannotFetch, match=r"gave nothing for 0\.2 s"):
            await fetch(client, {servers[0].address: ["a-1"]}, silent_s=0.2)

    drive(body, A)


def test_a_worker_that_is_slow_is_waited_for_while_it_gives(
    client: DataClient, monkeypatch: pytest.MonkeyPatch
):
    """The limit is for the time without a sample, not for all of them."""
    passed_s, next_one, wait = 0.0, threading.Semaphore(0), client_module._wait

    def wait_long(sources: Any) -> None:
        nonlocal passed_s
        next_one.release()
        wait(sources)
        passed_s += 0.9 * LIMIT_S

    monkeypatch.setattr(client_module, "_wait", wait_long)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: passed_s))

    async def body(servers: list[RunningServer]) -> None:
        (server,) = servers
        frames = server.data_server._frames

        def after_the_last_was_taken(key: str) -> Any:
            assert next_one.acquire(timeout=LIMIT_S)
            return frames(key)

        server.data_server._frames = after_the_last_was_taken
        assert await fetch(client, {server.address: list(A)}) == A
        assert passed_s > 2 * LIMIT_S

    drive(body, A)


@pytest.mark.parametrize("after", [0, 100, 400, 5000])
@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_a_connection_that_breaks_is_opened_again(client: DataClient, cuts: int, after: int):
    """after: bytes until it breaks; in the greeting, the handshake, a sample."""

    async def body(servers: list[RunningServer]) -> None:
        a, b = servers
        async with CuttingProxy(a.address, cuts, after) as proxy:
            wanted = {proxy.address: ["a-1", "a-3", "a-2"], b.address: ["b-1"]}
            assert await fetch(client, wanted) == A | B
            assert proxy.opened == cuts + 1
            # and it is kept for the next share
            assert await fetch(client, {proxy.address: ["a-1"]}) == {"a-1": A["a-1"]}
            assert proxy.opened == cuts + 1

    drive(body, A, B)


def test_a_connection_that_breaks_too_often_in_a_row_is_one_error(
    client: DataClient, monkeypatch: pytest.MonkeyPatch
):
    pause_s = 0.005
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", pause_s)

    async def body(servers: list[RunningServer]) -> None:
        async with CuttingProxy(servers[0].address, TRIES, 400) as proxy:
            began_s = time.monotonic()
            with pytest.raises(CannotFetch, match="out of reach"):
                await fetch(client, {proxy.address: ["a-1"]})
            assert time.monotonic() - began_s >= pause_s * (1 + 4 + 16)
            assert proxy.opened == TRIES
            assert await fetch(client, {proxy.address: ["a-1"]}) == {"a-1": A["a-1"]}

    drive(body, A)


def test_a_connection_may_break_more_often_while_samples_come(client: DataClient):
    size, many = 20_000, 3 * TRIES
    held = {f"k-{number:02}": frames_with(bytes(size)) for number in range(many)}

    async def body(servers: list[RunningServer]) -> None:
        # each connection carries one sample and a half
        async with CuttingProxy(servers[0].address, many - 2, size + size // 2) as proxy:
            assert await fetch(client, {proxy.address: list(held)}) == held
            assert proxy.opened > TRIES
            assert len(servers[0].asked) > many, "what was lost on the way is asked for again"

    drive(body, held)


def test_a_connection_that_broke_between_two_shares_does_not_count(client: DataClient):
    async def body(servers: list[RunningServer]) -> None:
        async with CuttingProxy(servers[0].address) as proxy:
            await fetch(client, {proxy.address: ["a-1"]})
            for _ in range(TRIES + 1):
                proxy.cut()
                dealer = client._connections[proxy.address].dealer
                assert dealer is not None
                _, monitor = dealer.sockets
                assert await asyncio.to_thread(monitor.poll, 1000 * LIMIT_S)
                proxy.cuts = TRIES - 1
                assert await fetch(client, {proxy.address: ["a-2"]}) == {"a-2": A["a-2"]}

    drive(body, A)


def test_a_machine_that_does_not_answer_at_all_is_noticed(
    client: DataClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client_module, "CONNECT_MS", 50)
    with sockets.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        where = listener.getsockname()
        fillers = [sockets.socket() for _ in range(4)]
        for filler in fillers:  # its queue is full: no further connection is answered
            filler.setblocking(False)
            filler.connect_ex(where)
        began_s = time.monotonic()
        with pytest.raises(CannotFetch, match="out of reach"):
            client.fetch({f"tcp://127.0.0.1:{where[1]}": ["a-1"]}, KEYS.ranks, LIMIT_S)
        assert time.monotonic() - began_s < SOON_S
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    "keys",
    [RankKeys(KEYS.ranks.controller, RunKeys.make().learner), RunKeys.make().ranks],
    ids=["a key of its own", "another run's"],
)
def test_a_wrong_key_gets_nothing(client: DataClient, keys: RankKeys):
    async def body(servers: list[RunningServer]) -> None:
        began_s = time.monotonic()
        with pytest.raises(CannotFetch, match="out of reach"):
            await fetch(client, {servers[0].address: ["a-1"]}, keys)
        assert time.monotonic() - began_s < SOON_S
        assert servers[0].asked == []

    drive(body, A)


def test_a_sample_that_is_too_large_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.002)

    async def body(servers: list[RunningServer]) -> None:
        rank = DataClient(len(A["a-3"][0]) - 1)
        with pytest.raises(CannotFetch, match="out of reach"):
            await fetch(rank, {servers[0].address: ["a-1", "a-3"]})
        assert await fetch(rank, {servers[0].address: ["a-1"]}) == {"a-1": A["a-1"]}
        rank.close()

    drive(body, A)


@pytest.mark.parametrize("number", [0, 1, FRAMES - 1, FRAMES + 1])
def test_a_sample_of_more_or_fewer_frames_is_none(client: DataClient, number: int):
    async def body(servers: list[RunningServer]) -> None:
        with pytest.raises(CannotFetch, match=r"does not hold sample x$"):
            await fetch(client, {servers[0].address: ["x"]})
        assert await fetch(client, {servers[0].address: ["a-1"]}) == {"a-1": A["a-1"]}

    drive(body, {"x": [b"frame"] * number, **A})


@pytest.mark.parametrize("given", ["b-1", "a-9"], ids=["another worker's", "nobody's"])
def test_a_worker_that_gives_what_it_was_not_asked_for_gives_none(client: DataClient, given: str):
    async def body(servers: list[RunningServer]) -> None:
        a, b = servers
        answer = a.data_server._answer
        a.data_server._answer = lambda key: [given.encode(), *answer(key)[1:]]
        with pytest.raises(CannotFetch, match=f"does not hold sample {given}$"):
            await fetch(client, {a.address: ["a-1"], b.address: ["b-1"]})
        a.data_server._answer = answer
        assert await fetch(client, {a.address: ["a-1"], b.address: ["b-1"]}) == {
            "a-1": A["a-1"],
            **B,
        }

    drive(body, A, B)
