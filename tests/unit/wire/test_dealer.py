"""A Dealer tells what its peer says and what becomes of the connection, in that order."""

import asyncio
import queue
import socket as sockets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from megatron_opd.wire.dealer import Connected, Dealer, Disconnected, LostHow
from megatron_opd.wire.keys import RankKeys, RunKeys
from megatron_opd.wire.sockets import PeerMessage, SocketLimits, wait_for_any
from tests.support.wire import KEYS, router

WAIT_S = 20.0
ANOTHER = RunKeys.make().ranks


@contextmanager
def dealt(address: str, keys: RankKeys = KEYS.ranks, **options: Any) -> Iterator[Dealer]:
    with zmq.Context() as context:
        limits = SocketLimits(1000)
        dealer = Dealer(context, address, keys.controller, keys.secret, limits, **options)
        try:
            yield dealer
        finally:
            dealer.close()


def next_of(dealer: Dealer) -> Any:
    """What comes next."""
    until_s = time.monotonic() + WAIT_S
    while (found := dealer.next_now()) is None:
        assert time.monotonic() < until_s, "nothing came"
        wait_for_any([dealer], 1.0)
    return found


def greeted(dealer: Dealer, socket: "zmq.Socket[bytes]") -> bytes:
    """Connect; return the route to it."""
    assert next_of(dealer) == Connected()
    dealer.send([b"hello"])
    route, said = socket.recv_multipart()
    assert said == b"hello"
    return route


def looks(dealer: Dealer) -> list[Any]:
    return [dealer.next_now() for _ in range(51)]


def waits_for(dealer: Dealer) -> list[Any]:
    async def main() -> list[Any]:
        return [await dealer.next(WAIT_S) for _ in range(51)]

    return asyncio.run(main())


@pytest.mark.parametrize("read", [waits_for, looks])
def test_what_the_peer_said_last_is_heard_before_it_is_gone(read: Callable[[Dealer], Any]):
    """All that it said and the end of the connection are there before any of it is read."""
    with router() as (socket, address), dealt(address, reconnects=False) as dealer:
        route = greeted(dealer, socket)
        for number in range(50):
            socket.send_multipart([route, b"%d" % number])
        messages, events = dealer.sockets
        assert messages.poll(WAIT_S * 1000)
        time.sleep(0.2)
        socket.close()
        assert events.poll(WAIT_S * 1000)
        assert dealer.has_ended()
        *heard, end = read(dealer)
        assert [bytes(message.buffers[0]) for message in heard] == [b"%d" % n for n in range(50)]
        assert end == Disconnected(LostHow.ENDED)


def test_what_came_after_a_look_is_heard_before_the_end_that_was_read(
    monkeypatch: pytest.MonkeyPatch,
):
    with router() as (socket, address), dealt(address, reconnects=False) as dealer:
        route = greeted(dealer, socket)
        look = dealer._look

        def look_and_hear() -> bool:
            socket.send_multipart([route, b"last words"])
            assert dealer.sockets[0].poll(WAIT_S * 1000)
            dealer._note(zmq.EVENT_DISCONNECTED, 0)
            return look()

        monkeypatch.setattr(dealer, "_look", look_and_hear)
        found = dealer.next_now()
        monkeypatch.undo()
        assert isinstance(found, PeerMessage)
        assert list(map(bytes, found.buffers)) == [b"last words"]
        assert dealer.next_now() == Disconnected(LostHow.ENDED)


@pytest.mark.parametrize(
    ("keys", "how"),
    [
        (RankKeys(KEYS.ranks.controller, ANOTHER.secret), LostHow.KEY_REFUSED),
        (RankKeys(ANOTHER.controller, KEYS.learner), LostHow.KEY_UNKNOWN),
    ],
    ids=["its key", "the peer's key"],
)
def test_a_wrong_key_is_told_and_nothing_else(keys: RankKeys, how: LostHow):
    with router() as (socket, address), dealt(address, keys, reconnects=False) as dealer:
        dealer.send([b"secret"])
        assert next_of(dealer) == Disconnected(how)
        assert next_of(dealer) == Disconnected(LostHow.ENDED)
        assert not socket.poll(100)


@pytest.mark.parametrize("reconnects", [True, False])
def test_nobody_at_an_address_is_told_and_tried_again_unless_told_otherwise(reconnects: bool):
    with sockets.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with dealt(address, reconnects=reconnects) as dealer:
        assert next_of(dealer) == Disconnected(LostHow.UNREACHED)
        if reconnects:
            assert next_of(dealer) == Disconnected(LostHow.UNREACHED)
        wait_for_any([dealer], 0.0 if reconnects else 0.5)
        assert dealer.next_now() is None
        dealer.send([b"lost, or said later"])


def test_a_frame_above_the_limit_ends_the_connection():
    with router() as (socket, address), dealt(address, reconnects=False) as dealer:
        route = greeted(dealer, socket)
        socket.send_multipart([route, bytes(900)])
        assert list(map(bytes, next_of(dealer).buffers)) == [bytes(900)]
        socket.send_multipart([route, bytes(1001)])
        assert next_of(dealer) == Disconnected(LostHow.ENDED)


@pytest.mark.parametrize("before", [True, False], ids=["had ended before", "ends then"])
def test_a_thread_of_its_own_is_told_of_the_end(before: bool):
    with router() as (socket, address), dealt(address) as dealer:
        route = greeted(dealer, socket)
        told = queue.Queue[str]()
        if before:
            socket.close()
            assert dealer.sockets[1].poll(WAIT_S * 1000)
            assert dealer.has_ended()
        dealer.watch(lambda: told.put("ended"))
        if not before:
            socket.send_multipart([route, b"work"])
            assert list(map(bytes, dealer.receive())) == [b"work"]
            assert told.empty()
            socket.close()
        assert told.get(timeout=WAIT_S) == "ended"


def test_a_thread_that_watches_ends_with_it_and_says_nothing():
    told = queue.Queue[str]()
    with router() as (socket, address):
        with dealt(address) as dealer:
            greeted(dealer, socket)
            dealer.watch(lambda: told.put("ended"))
            watcher = dealer._watcher
        assert watcher is not None
        assert not watcher.is_alive()
        assert told.empty()


def test_what_was_sent_last_leaves_before_it_closes():
    with router() as (socket, address), zmq.Context() as context:
        keys = KEYS.ranks
        dealer = Dealer(context, address, keys.controller, keys.secret, SocketLimits(1000))
        dealer.send([b"the reason"])
        dealer.close(linger_ms=round(WAIT_S * 1000))
        assert socket.recv_multipart()[1:] == [b"the reason"]
