"""What two ends over TCP do about frames that ZeroMQ drops, and about those that only seem lost."""

import time
from typing import Any

import pytest
import zmq

from checks.link.proxy import Proxy
from megatron_opd.wire import sockets
from megatron_opd.wire.link import ends as link_ends
from megatron_opd.wire.link.channel import Channel, Draft
from megatron_opd.wire.link.events import Restarted
from megatron_opd.wire.link.peer import IN_THREAD_BYTES
from megatron_opd.wire.link.wire import BULK, Buffer, LinkWelcome, Pong, read_note
from megatron_opd.wire.router import Router
from tests.support.link_ends import PATIENCE_S, drive, ends, link_config, message


def test_a_connection_that_ends_between_a_look_and_a_receive_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
):
    """ZeroMQ then drops what it had ready: whoever waits for it waits for ever."""
    receive, dropped = sockets.received, list[object]()

    def ended(socket: "zmq.Socket[Any]") -> object:
        if cutting and not dropped and socket.type == zmq.DEALER:
            while socket.poll(0):
                dropped.append(socket.recv_multipart())
            if dropped:
                cutting[0].cut()
        return receive(socket)

    monkeypatch.setattr(sockets, "received", ended)
    cutting: list[Proxy] = []

    async def body() -> None:
        async with ends(link_config(heartbeat_s=60)) as net:
            proxy = Proxy(net.port)
            client = net.client(await proxy.start())
            assert await client.next() == Restarted("server")
            cutting.append(proxy)
            await net.server.send("site", [b"dropped"])
            assert await message(client) == b"dropped"
            assert dropped
            await proxy.close()

    drive(body)


def test_a_connection_whose_greeting_was_lost_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
):
    """The next frame tells of the loss, long before the time for a greeting is over."""
    monkeypatch.setattr(link_ends, "GREETING_S", 1e6)
    send, lost = Router.send, []

    def lose_one(router: Router, route: bytes, frames: list[Buffer]) -> None:
        if lost:
            send(router, route, frames)
        lost.append(frames)

    monkeypatch.setattr(Router, "send", lose_one)

    async def body() -> None:
        async with ends() as net:
            client = net.client()
            await client.send([b"after all"])
            assert await message(net.server) == b"after all"
            assert isinstance(read_note(lost[0][0], 0), LinkWelcome)

    drive(body)


def test_heartbeats_while_a_chunk_is_made_send_nothing_again(monkeypatch: pytest.MonkeyPatch):
    ponged, sealed = Channel.ponged, Channel.sealed
    answers = []

    def note_answer(channel: Channel, pong: Pong, now_s: float) -> bool:
        answers.append(channel)
        return ponged(channel, pong, now_s)

    def seal_slowly(channel: Channel, draft: Draft) -> list[Buffer]:
        in_thread = sum(stop - start for _, start, stop in draft.pieces) >= IN_THREAD_BYTES
        wanted = answers.count(channel) + 2 * in_thread
        stop_s = time.monotonic() + PATIENCE_S
        while answers.count(channel) < wanted and time.monotonic() < stop_s:
            time.sleep(0.005)
        return sealed(channel, draft)

    monkeypatch.setattr(Channel, "ponged", note_answer)
    monkeypatch.setattr(Channel, "sealed", seal_slowly)

    async def body() -> None:
        async with ends() as net:
            client = net.client()
            big = bytes(IN_THREAD_BYTES)
            await client.send([big], BULK)
            assert await message(net.server) == big
            assert len(answers) >= 2
            assert client.counts().bytes_again == 0

    drive(body)
