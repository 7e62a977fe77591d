"""A Router tells what peers say and when they are gone, in that order, and admits nobody else."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import zmq

from megatron_opd.wire import gate
from megatron_opd.wire.gate import show_keys
from megatron_opd.wire.keys import RankKeys, RunKeys
from megatron_opd.wire.router import PeerGone, Router, StrangerGone
from megatron_opd.wire.sockets import PeerMessage, SocketLimits
from tests.support.wire import KEYS, connect

ANOTHER = RunKeys.make().learner
STRANGERS = {
    "no keys": None,
    "a key of its own": RankKeys(KEYS.ranks.controller, ANOTHER),
    "keys of another run": RunKeys.make().ranks,
}
LIMITS = SocketLimits(1000)


@asynccontextmanager
async def routed(
    limits: SocketLimits = LIMITS, **options: Any
) -> AsyncIterator[tuple[Router, Any]]:
    """A Router, and a context of peers."""
    router = Router("tcp://127.0.0.1:*", KEYS.controller, KEYS.admitted, limits, **options)
    context = zmq.Context()
    try:
        async with asyncio.timeout(30):
            yield router, context
    finally:
        context.destroy(linger=0)
        router.close()


def speaks(context: Any, router: Router, *frames: bytes, keys: RankKeys | None = KEYS.ranks) -> Any:
    peer = connect(context, router.address, keys)
    peer.send_multipart(frames or (b"hello",))
    return peer


async def heard(router: Router) -> tuple[bytes, list[bytes]]:
    """The next message: its route and frames."""
    found = await router.next()
    assert isinstance(found, PeerMessage), found
    return found.route, list(map(bytes, found.buffers))


async def has_ended(router: Router) -> None:
    """Wait until the end of a connection is there to be read; read nothing."""
    _, monitor, _ = router.sockets
    while not monitor.poll(0):  # noqa: ASYNC110  another thread's socket
        await asyncio.sleep(0.01)


def says_and_leaves(context: Any, peer: Any) -> None:
    """Send much, end the connection, and let all of it arrive before anything else happens."""
    for number in range(50):
        peer.send(b"%d" % number)
    peer.close(linger=5000)
    context.term()  # waits until it was sent
    time.sleep(0.2)


async def waits_for(router: Router, count: int = 51) -> list[Any]:
    return [await router.next() for _ in range(count)]


async def looks(router: Router) -> list[Any]:
    return [router.next_now() for _ in range(51)]


@pytest.mark.parametrize("read", [waits_for, looks])
def test_what_a_peer_said_last_is_heard_before_it_is_gone(read: Callable[[Router], Any]):
    """All that it said and the end of its connection are there before any of it is read."""

    async def main() -> None:
        async with routed() as (router, context):
            peer = speaks(context, router)
            route, _ = await heard(router)
            says_and_leaves(context, peer)
            *messages, end = await read(router)
            assert [bytes(message.buffers[0]) for message in messages] == [
                b"%d" % number for number in range(50)
            ]
            assert {message.route for message in messages} == {route}
            assert end == PeerGone(route)
            assert router.next_now() is None

    asyncio.run(main())


def test_so_it_is_when_its_end_was_read_before_it_was_known_whose_it_is():
    async def main() -> None:
        async with routed() as (router, context):
            peer = connect(context, router.address)
            monitor = peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            while not monitor.poll(0):
                assert await router.next(0.01) is None
            peer.disable_monitor()
            monitor.close()
            says_and_leaves(context, peer)
            router._look()
            *messages, end = await looks(router)
            assert {message.route for message in messages} == {end.route}

    asyncio.run(main())


def test_what_came_after_a_look_is_heard_before_the_end_that_was_read(
    monkeypatch: pytest.MonkeyPatch,
):
    async def main() -> None:
        async with routed() as (router, context):
            first, second = speaks(context, router, b"first"), speaks(context, router, b"second")
            routes = {said[0]: route for route, said in [await heard(router), await heard(router)]}
            look = router._look

            def look_and_hear() -> bool:
                more = look()
                second.send(b"last words")
                assert router.sockets[0].poll(5000)
                return more

            first.close(linger=0)
            await has_ended(router)
            monkeypatch.setattr(router, "_look", look_and_hear)
            assert await heard(router) == (routes[b"second"], [b"last words"])
            monkeypatch.undo()
            assert await router.next() == PeerGone(routes[b"first"])

    asyncio.run(main())


def test_the_end_of_a_connection_is_not_that_of_the_next_with_its_descriptor():
    """Before: a data worker that came as another ended was taken for lost, and awaited for ever."""

    async def main() -> None:
        async with routed() as (router, context):
            accepted: list[int] = []
            router._accepted = accepted.append
            former = speaks(context, router)
            route, _ = await heard(router)
            former.close(linger=0)
            await has_ended(router)  # and nobody has looked
            peer = speaks(context, router)
            end, message = await router.next(), await router.next()
            assert end == PeerGone(route)
            assert isinstance(message, PeerMessage)
            assert accepted == accepted[:1] * 2, "what is tested"
            peer.close(linger=0)
            assert await router.next() == PeerGone(message.route)
            assert await router.next(0.1) is None

    asyncio.run(main())


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_not_heard_and_its_end_is_told(who: str):
    async def main() -> None:
        async with routed() as (router, context):
            stranger = connect(context, router.address, STRANGERS[who])
            with contextlib.suppress(zmq.Again):  # it may be refused before it could send
                stranger.send(b"forged", zmq.NOBLOCK)
            assert await router.next() == StrangerGone()
            shown = who == "a key of its own"  # others do not come so far
            assert router.keys_refused["127.0.0.1"] >= shown
            stranger.close()
            peer = speaks(context, router)
            while isinstance(found := await router.next(), StrangerGone):
                pass
            assert isinstance(found, PeerMessage)
            router.send(found.route, [b"welcome"])
            assert peer.recv() == b"welcome"

    asyncio.run(main())


def test_refused_keys_of_many_addresses_are_counted_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "MAX_ADDRESSES", 0)

    async def main() -> None:
        async with routed() as (router, context):
            stranger = connect(context, router.address, STRANGERS["a key of its own"])
            assert await router.next() == StrangerGone()
            assert router.keys_refused.keys() == {gate.OTHERS}
            stranger.close()

    asyncio.run(main())


def test_a_frame_above_the_limit_ends_its_connection():
    async def main() -> None:
        async with routed() as (router, context):
            peer = speaks(context, router, bytes(900))
            route, frames = await heard(router)
            assert frames == [bytes(900)]
            peer.send(bytes(1001))
            assert await router.next() == PeerGone(route)

    asyncio.run(main())


MIB, MANY = 1 << 20, 100
"""More than the buffers of a connection hold."""


@pytest.mark.parametrize("limit", [2, 0])
def test_no_more_messages_wait_for_the_owner_than_the_limit_says(limit: int):
    """The rest waits at the peer; 0 is no limit."""

    async def main() -> None:
        async with routed(SocketLimits(2 * MIB, waiting_in=limit)) as (router, context):
            peer = context.socket(zmq.DEALER)
            show_keys(peer, KEYS.ranks.controller, KEYS.ranks.secret)
            peer.set(zmq.SNDHWM, 1)
            peer.set(zmq.SNDTIMEO, 1000)
            peer.connect(router.address)
            peer.send(b"hello")
            await heard(router)
            sent = 0
            with contextlib.suppress(zmq.Again):
                while sent < MANY:
                    peer.send(bytes(MIB))
                    sent += 1
            assert (sent < MANY) == bool(limit)
            assert [len(message.buffers[0]) for message in await waits_for(router, sent)] == [
                MIB
            ] * sent

    asyncio.run(main())


@pytest.mark.parametrize("limit", [2, 0])
def test_no_more_messages_wait_for_a_peer_than_the_limit_says(limit: int):
    async def main() -> None:
        async with routed(SocketLimits(2 * MIB, waiting_out=limit)) as (router, context):
            peer = context.socket(zmq.DEALER)
            show_keys(peer, KEYS.ranks.controller, KEYS.ranks.secret)
            peer.set(zmq.RCVHWM, 1)
            peer.connect(router.address)
            peer.send(b"hello")
            route, _ = await heard(router)
            sent = 0
            with contextlib.suppress(zmq.Again):
                while sent < MANY:
                    router.send(route, [bytes(MIB)])
                    sent += 1
            assert (sent < MANY) == bool(limit)

    asyncio.run(main())


def test_what_is_sent_to_nobody_is_an_error():
    async def main() -> None:
        async with routed() as (router, context):
            peer = speaks(context, router)
            route, _ = await heard(router)
            peer.close()
            assert await router.next() == PeerGone(route)
            for gone in (route, b"nobody"):
                with pytest.raises(zmq.ZMQError):
                    router.send(gone, [b"hello"])

    asyncio.run(main())


def test_what_was_sent_last_leaves_before_it_closes():
    async def main() -> None:
        async with routed() as (router, context):
            peer = speaks(context, router)
            route, _ = await heard(router)
            router.send(route, [b"refused", b"because"])
            router.close(linger_ms=5000)
            assert router.closed
            router.close()
            assert peer.recv_multipart() == [b"refused", b"because"]

    asyncio.run(main())


def test_who_waits_while_it_closes_is_cancelled_and_disturbs_no_other():
    """The descriptors of a Router that was closed are those of the next one."""

    async def main() -> None:
        async with routed() as (router, context):
            waiting = asyncio.create_task(router.next())
            await asyncio.sleep(0.05)
            waiting.cancel()
            descriptors = [each.fileno() for each in router.sockets]
            router.close()
            async with routed() as (other, _):
                assert {each.fileno() for each in other.sockets} & set(descriptors)
                hearing = asyncio.create_task(heard(other))
                await asyncio.gather(waiting, return_exceptions=True)
                assert waiting.cancelled()
                peer = speaks(context, other)
                assert (await hearing)[1] == [b"hello"]
                peer.close()

    asyncio.run(main())


def test_an_address_that_is_taken_is_an_error_and_leaves_nothing_behind():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            Router(address, KEYS.controller, KEYS.admitted, LIMITS)


def test_what_comes_in_a_short_time_is_taken_together(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with routed(together_s=0.2) as (router, context):
            peer = speaks(context, router)
            await heard(router)
            looked_s: list[float] = []
            look = router._look

            def noted_look() -> bool:
                looked_s.append(time.monotonic())
                return look()

            monkeypatch.setattr(router, "_look", noted_look)
            reading = asyncio.create_task(waits_for(router, 20))
            for number in range(20):
                peer.send(b"%d" % number)
                await asyncio.sleep(0.005)
            await reading
            pauses_s = np.diff(looked_s)
            assert len(looked_s) < 20
            assert (pauses_s > 0.15).all()

    asyncio.run(main())
