"""Ranks take samples from data workers over real sockets, and know soon when they cannot."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec
import pytest
import zmq
import zmq.asyncio

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.transport.keys import RankKeys, RunKeys
from megatron_opd.workers.giving import Giving
from megatron_opd.workers.taking import Taking
from tests.support.wire import KEYS

LIMIT_S = 60.0
SOON_S = 20.0
"""Far less than LIMIT_S, far more than a busy machine takes to notice."""


class Given:
    """A worker's end: what it holds, and which questions came."""

    def __init__(self, context: zmq.asyncio.Context, held: Mapping[str, Sequence[bytes]]) -> None:
        self.held, self.asked = dict(held), list[str]()
        self.giving = Giving(context, "127.0.0.1", KEYS.ranks, self._frames)
        self.task = asyncio.create_task(self.giving.serve())

    @property
    def address(self) -> str:
        return self.giving.address

    @property
    def refused(self) -> int:
        return self.giving._refusals.count

    def _frames(self, key: str) -> list[bytes]:
        self.asked.append(key)
        if key == "malformed":
            raise ValueError("rows do not fit")
        if key not in self.held:
            raise SamplesLost(key)
        return list(self.held[key])

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.giving.close()


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
def taking() -> Iterator[Taking]:
    made = Taking(1 << 20)
    yield made
    made.close()


async def take(
    taking: Taking,
    wanted: Mapping[str, Sequence[str]],
    keys: RankKeys = KEYS.ranks,
    limit_s: float = LIMIT_S,
) -> dict[str, list[bytes]] | None:
    found = await asyncio.to_thread(taking.take, wanted, keys, limit_s)
    return found and {key: list(map(bytes, frames)) for key, frames in found.items()}


A = {
    "a-1": [b"one", b"", b""],
    "a-2": [b"two", b"x", b"y"],
    "a-3": [bytes(300_000), b"", b""],
}
B = {"b-1": [b"three", b"four", b""]}


def test_a_share_is_taken_from_all_workers_and_then_the_next(taking: Taking):
    async def body(givers: list[Given]) -> None:
        a, b = (giver.address for giver in givers)
        assert await take(taking, {a: ["a-3", "a-1"], b: ["b-1"]}) == {
            **{key: A[key] for key in ("a-1", "a-3")},
            **B,
        }
        assert await take(taking, {a: ["a-2"]}) == {"a-2": A["a-2"]}
        assert await take(taking, {b: ["b-1"]}) == B
        assert await take(taking, {}) == {}
        assert givers[0].asked == ["a-3", "a-1", "a-2"]

    drive(body, A, B)


@pytest.mark.parametrize("missing", ["gone", "malformed"])
def test_what_is_not_held_is_told_at_once_and_confuses_no_later_share(taking: Taking, missing: str):
    newer = [b"newer", b"", b""]

    async def body(givers: list[Given]) -> None:
        a, b = (giver.address for giver in givers)
        for _ in range(3):
            # the answers to the rest are on their way when it is known
            began_s = time.monotonic()
            assert await take(taking, {a: [missing, "a-1", "a-3"], b: ["b-1"]}) is None
            assert time.monotonic() - began_s < SOON_S
            givers[0].held["a-1"] = newer
            assert await take(taking, {a: ["a-1"], b: ["b-1"]}) == {"a-1": newer, **B}

    drive(body, A, B)


@pytest.mark.parametrize("frames", [[], [b"a"], [b"a", b"b"], [b"a", b"b", b"c", b"d"]], ids=len)
def test_a_sample_of_more_or_fewer_frames_is_none(taking: Taking, frames: list[bytes]):
    async def body(givers: list[Given]) -> None:
        assert await take(taking, {givers[0].address: ["x"]}) is None
        assert await take(taking, {givers[0].address: ["a-1"]}) == {"a-1": A["a-1"]}

    drive(body, {"x": frames, **A})


@pytest.mark.parametrize("given", ["b-1", "a-9"], ids=["another worker's", "nobody's"])
def test_a_worker_that_gives_what_it_was_not_asked_for_gives_none(taking: Taking, given: str):
    async def body(givers: list[Given]) -> None:
        a, b = givers
        answer = a.giving._answer
        a.giving._answer = lambda key: [given.encode(), *answer(key)[1:]]  # type: ignore
        assert await take(taking, {a.address: ["a-1"], b.address: ["b-1"]}) is None
        a.giving._answer = answer
        assert await take(taking, {a.address: ["a-1"], b.address: ["b-1"]}) == {
            "a-1": A["a-1"],
            **B,
        }

    drive(body, A, B)


def test_a_worker_that_is_gone_is_noticed_long_before_the_limit(taking: Taking):
    async def body(givers: list[Given]) -> None:
        a, b = givers
        assert await take(taking, {a.address: ["a-1"], b.address: ["b-1"]}) is not None
        await a.end()
        began_s = time.monotonic()
        assert await take(taking, {a.address: ["a-2"], b.address: ["b-1"]}) is None
        assert await take(taking, {a.address: ["a-2"]}) is None, "nobody listens there"
        assert time.monotonic() - began_s < SOON_S
        assert await take(taking, {b.address: ["b-1"]}) == B

    drive(body, A, B)


def test_a_worker_that_is_silent_costs_the_limit_and_no_more(taking: Taking):
    async def body(givers: list[Given]) -> None:
        givers[0].task.cancel()  # connections are not answered any more
        assert await take(taking, {givers[0].address: ["a-1"]}, limit_s=0.2) is None

    drive(body, A)


@pytest.mark.parametrize(
    "keys",
    [RankKeys(KEYS.ranks.controller, RunKeys.make().learner), RunKeys.make().ranks],
    ids=["a key of its own", "another run's"],
)
def test_a_wrong_key_gets_nothing(taking: Taking, keys: RankKeys):
    async def body(givers: list[Given]) -> None:
        began_s = time.monotonic()
        assert await take(taking, {givers[0].address: ["a-1"]}, keys) is None
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
        [msgspec.msgpack.encode(["a-1", "a-2", "a-1"])],
        [msgspec.msgpack.encode(["a-1"]), b"more"],
        [b"\x91" * 100_000],
        [b"\x91\xa1\xff"],  # no UTF-8
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
