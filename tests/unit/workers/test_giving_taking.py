"""Ranks take samples from data workers over real sockets, and know soon when they cannot."""

import asyncio
import socket as sockets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from megatron_opd.transport.keys import RankKeys, RunKeys
from megatron_opd.workers import giving as giving_module
from megatron_opd.workers import taking as taking_module
from megatron_opd.workers.taking import TRIES, CannotTake, Taking
from tests.support.cutting_proxy import CuttingProxy
from tests.support.data_workers import Given
from tests.support.wire import KEYS

LIMIT_S = 60.0
SOON_S = 20.0
"""Far less than LIMIT_S, far more than a busy machine takes to notice."""


def drive(
    body: Callable[[list[Given]], Awaitable[None]], *held: Mapping[str, Sequence[bytes]]
) -> None:
    """Run `body` beside one worker for each mapping; each has sockets of its own."""

    async def main() -> None:
        contexts = [zmq.asyncio.Context() for _ in held]
        givers = [Given(c, names) for c, names in zip(contexts, held, strict=True)]
        try:
            await asyncio.wait_for(body(givers), 120)
        finally:
            for giver, context in zip(givers, contexts, strict=True):
                await giver.end()
                context.destroy(linger=0)

    asyncio.run(main())


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taking]:
    monkeypatch.setattr(taking_module, "FIRST_PAUSE_S", 0.002)
    made = Taking(1 << 20)
    yield made
    made.close()


async def take(
    taking: Taking,
    wanted: Mapping[str, Sequence[str]],
    keys: RankKeys = KEYS.ranks,
    silent_s: float = LIMIT_S,
) -> dict[str, list[bytes]]:
    found = await asyncio.to_thread(taking.take, wanted, keys, silent_s)
    return {key: list(map(bytes, frames)) for key, frames in found.items()}


A = {"a-1": [b"one", b""], "a-2": [b"two"], "a-3": [bytes(300_000)]}
B = {"b-1": [b"three", b"four"]}


def test_a_share_is_taken_from_all_workers_and_then_the_next(taking: Taking):
    async def body(givers: list[Given]) -> None:
        a, b = (giver.address for giver in givers)
        assert await take(taking, {a: ["a-3", "a-1"], b: ["b-1"]}) == {
            **{key: A[key] for key in ("a-1", "a-3")},
            **B,
        }
        assert await take(taking, {a: ["a-2"]}) == {"a-2": A["a-2"]}
        assert await take(taking, {b: ["b-1"]}) == B
        assert taking._sources.keys() == {b}, "others are not asked for now"
        assert await take(taking, {}) == {}
        assert givers[0].asked == ["a-1", "a-3", "a-2"]

    drive(body, A, B)


@pytest.mark.parametrize("missing", ["gone", "malformed"])
def test_what_is_not_held_is_told_at_once_and_confuses_no_later_share(taking: Taking, missing: str):
    async def body(givers: list[Given]) -> None:
        a, b = (giver.address for giver in givers)
        for _ in range(3):
            # the answers to the rest are on their way when it is known
            began_s = time.monotonic()
            with pytest.raises(CannotTake, match=f"^{a} does not hold sample {missing}$"):
                await take(taking, {a: [missing, "a-1", "a-3"], b: ["b-1"]})
            assert time.monotonic() - began_s < SOON_S
            givers[0].held["a-1"] = [b"newer"]
            assert await take(taking, {a: ["a-1"], b: ["b-1"]}) == {"a-1": [b"newer"], **B}

    drive(body, A, B)


def test_a_worker_that_is_gone_is_noticed_long_before_the_limit(taking: Taking):
    async def body(givers: list[Given]) -> None:
        a, b = givers
        await take(taking, {a.address: ["a-1"], b.address: ["b-1"]})
        await a.end()
        began_s = time.monotonic()
        gone = f"^{a.address} is out of reach: {TRIES} connections were refused or broke$"
        with pytest.raises(CannotTake, match=gone):
            await take(taking, {a.address: ["a-2"], b.address: ["b-1"]})
        with pytest.raises(CannotTake, match=gone):
            await take(taking, {a.address: ["a-2"]})
        assert time.monotonic() - began_s < SOON_S
        assert await take(taking, {b.address: ["b-1"]}) == B

    drive(body, A, B)


def test_a_worker_that_ends_while_it_gives_is_noticed(taking: Taking):
    async def body(givers: list[Given]) -> None:
        (giver,) = givers

        def ends(key: str) -> list[bytes]:
            raise RuntimeError("the worker's process ends")

        giver.giving._frames = ends
        taken = asyncio.ensure_future(take(taking, {giver.address: ["a-1"]}))
        with pytest.raises(ExceptionGroup):
            await giver.task
        giver.giving.close()
        with pytest.raises(CannotTake, match="out of reach"):
            await taken

    drive(body, A)


def test_a_worker_that_is_silent_costs_the_limit_and_no_more(taking: Taking):
    async def body(givers: list[Given]) -> None:
        givers[0].task.cancel()  # connections are not answered any more
        with pytest.raises(CannotTake, match=r"gave nothing for 0\.2 s"):
            await take(taking, {givers[0].address: ["a-1"]}, silent_s=0.2)

    drive(body, A)


def test_a_worker_that_is_slow_is_waited_for_while_it_gives(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
):
    """The limit is for the time without a sample, not for all of them."""
    passed_s, next_one, wait = 0.0, threading.Semaphore(0), taking_module._wait

    def wait_long(sources: Any) -> None:
        nonlocal passed_s
        next_one.release()
        wait(sources)
        passed_s += 0.9 * LIMIT_S

    monkeypatch.setattr(taking_module, "_wait", wait_long)
    monkeypatch.setattr(taking_module, "time", SimpleNamespace(monotonic=lambda: passed_s))

    async def body(givers: list[Given]) -> None:
        (giver,) = givers
        frames = giver.giving._frames

        def after_the_last_was_taken(key: str) -> Any:
            assert next_one.acquire(timeout=LIMIT_S)
            return frames(key)

        giver.giving._frames = after_the_last_was_taken
        assert await take(taking, {giver.address: list(A)}) == A
        assert passed_s > 2 * LIMIT_S

    drive(body, A)


@pytest.mark.parametrize("after", [0, 100, 400, 5000])
@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_a_connection_that_breaks_is_opened_again(taking: Taking, cuts: int, after: int):
    """after: bytes until it breaks; in the greeting, the handshake, a sample."""

    async def body(givers: list[Given]) -> None:
        a, b = givers
        async with CuttingProxy(a.address, cuts, after) as proxy:
            wanted = {proxy.address: ["a-1", "a-3", "a-2"], b.address: ["b-1"]}
            assert await take(taking, wanted) == A | B
            assert proxy.opened == cuts + 1
            # and it is kept for the next share
            assert await take(taking, {proxy.address: ["a-1"]}) == {"a-1": A["a-1"]}
            assert proxy.opened == cuts + 1

    drive(body, A, B)


def test_a_connection_that_breaks_too_often_in_a_row_is_one_error(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
):
    pause_s = 0.005
    monkeypatch.setattr(taking_module, "FIRST_PAUSE_S", pause_s)

    async def body(givers: list[Given]) -> None:
        async with CuttingProxy(givers[0].address, TRIES, 400) as proxy:
            began_s = time.monotonic()
            with pytest.raises(CannotTake, match="out of reach"):
                await take(taking, {proxy.address: ["a-1"]})
            assert time.monotonic() - began_s >= pause_s * (1 + 4 + 16)
            assert proxy.opened == TRIES
            assert await take(taking, {proxy.address: ["a-1"]}) == {"a-1": A["a-1"]}

    drive(body, A)


def test_a_connection_may_break_more_often_while_samples_come(taking: Taking):
    size, many = 20_000, 3 * TRIES
    held = {f"k-{number:02}": [bytes(size)] for number in range(many)}

    async def body(givers: list[Given]) -> None:
        # each connection carries one sample and a half
        async with CuttingProxy(givers[0].address, many - 2, size + size // 2) as proxy:
            assert await take(taking, {proxy.address: list(held)}) == held
            assert proxy.opened > TRIES
            assert len(givers[0].asked) > many, "what was lost on the way is asked for again"

    drive(body, held)


def test_a_connection_that_broke_between_two_shares_does_not_count(taking: Taking):
    async def body(givers: list[Given]) -> None:
        async with CuttingProxy(givers[0].address) as proxy:
            await take(taking, {proxy.address: ["a-1"]})
            for _ in range(TRIES + 1):
                proxy.cut()
                _, monitor = taking._sources[proxy.address].sockets
                assert await asyncio.to_thread(monitor.poll, 1000 * LIMIT_S)
                proxy.cuts = TRIES - 1
                assert await take(taking, {proxy.address: ["a-2"]}) == {"a-2": A["a-2"]}

    drive(body, A)


def test_a_machine_that_does_not_answer_at_all_is_noticed(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(taking_module, "CONNECT_MS", 50)
    with sockets.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        where = listener.getsockname()
        fillers = [sockets.socket() for _ in range(4)]
        for filler in fillers:  # its queue is full: no further connection is answered
            filler.setblocking(False)
            filler.connect_ex(where)
        began_s = time.monotonic()
        with pytest.raises(CannotTake, match="out of reach"):
            taking.take({f"tcp://127.0.0.1:{where[1]}": ["a-1"]}, KEYS.ranks, LIMIT_S)
        assert time.monotonic() - began_s < SOON_S
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    "keys",
    [RankKeys(KEYS.ranks.controller, RunKeys.make().learner), RunKeys.make().ranks],
    ids=["a key of its own", "another run's"],
)
def test_a_wrong_key_gets_nothing(taking: Taking, keys: RankKeys):
    async def body(givers: list[Given]) -> None:
        began_s = time.monotonic()
        with pytest.raises(CannotTake, match="out of reach"):
            await take(taking, {givers[0].address: ["a-1"]}, keys)
        assert time.monotonic() - began_s < SOON_S
        assert givers[0].asked == []

    drive(body, A)


def test_a_stranger_who_knows_the_public_key_is_refused_and_counted(taking: Taking):
    async def body(givers: list[Given]) -> None:
        stranger = rank_socket(givers[0].address, RunKeys.make().learner)
        await stranger.send(msgspec.msgpack.encode(["a-1"]))
        while not givers[0].refused:  # noqa: ASYNC110  a count has no event
            await asyncio.sleep(0.01)
        assert await stranger.poll(100) == 0
        assert givers[0].asked == []
        assert await take(taking, {givers[0].address: ["a-2"]}) == {"a-2": A["a-2"]}
        stranger.context.destroy(linger=0)

    drive(body, A)


def rank_socket(address: str, secret: bytes = KEYS.ranks.secret) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context().socket(zmq.DEALER)
    socket.curve_serverkey = zmq.curve_public(KEYS.ranks.secret)
    socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
    socket.connect(address)
    return socket


def test_garbage_is_counted_and_nothing_is_given(taking: Taking):
    questions = [
        [b"\xc1"],
        [b""],
        [msgspec.msgpack.encode("a-1")],
        [msgspec.msgpack.encode([1])],
        [msgspec.msgpack.encode(["a-1"]), b"more"],
        [b"\x91" * 100_000],
    ]

    async def body(givers: list[Given]) -> None:
        rank = rank_socket(givers[0].address)
        for frames in questions:
            await rank.send_multipart(frames)
        await rank.send(msgspec.msgpack.encode(["a-1"]))
        assert await rank.recv_multipart() == [b"a-1", *A["a-1"]]
        assert givers[0].refused == len(questions)
        assert givers[0].asked == ["a-1"]
        assert await take(taking, {givers[0].address: ["a-2"]}) == {"a-2": A["a-2"]}
        rank.context.destroy(linger=0)

    drive(body, A)


def test_ranks_that_leave_are_no_strangers():
    async def body(givers: list[Given]) -> None:
        (giver,) = givers
        rank = Taking(1 << 20)
        assert await take(rank, {giver.address: ["a-1"]}) == {"a-1": A["a-1"]}
        assert len(giver.giving._known) == 1
        await asyncio.to_thread(rank.close)
        stranger = rank_socket(giver.address, RunKeys.make().learner)
        async with asyncio.timeout(SOON_S):
            while giver.giving._known or not giver.refused:  # noqa: ASYNC110  counts have no event
                await asyncio.sleep(0.01)
        assert giver.refused == 1
        stranger.context.destroy(linger=0)

    drive(body, A)


def test_a_question_that_is_too_long_ends_its_connection(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(giving_module, "MAX_ASK_BYTES", 1000)

    async def body(givers: list[Given]) -> None:
        with pytest.raises(CannotTake, match="out of reach"):
            await take(taking, {givers[0].address: ["a-1" * 1000]}, silent_s=SOON_S)
        assert givers[0].asked == []
        assert await take(taking, {givers[0].address: ["a-2"]}) == {"a-2": A["a-2"]}

    drive(body, A)


def test_a_sample_that_is_too_large_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(taking_module, "FIRST_PAUSE_S", 0.002)

    async def body(givers: list[Given]) -> None:
        rank = Taking(len(A["a-3"][0]) - 1)
        with pytest.raises(CannotTake, match="out of reach"):
            await take(rank, {givers[0].address: ["a-1", "a-3"]})
        assert await take(rank, {givers[0].address: ["a-1"]}) == {"a-1": A["a-1"]}
        rank.close()

    drive(body, A)


def test_a_sample_that_was_not_asked_for_is_not_taken(taking: Taking):
    async def body(givers: list[Given]) -> None:
        givers[0].giving._answer = lambda key: [b"a-2", *A["a-2"]]
        with pytest.raises(CannotTake, match="does not hold sample a-2"):
            await take(taking, {givers[0].address: ["a-1"]})

    drive(body, A)
