"""What strangers, and peers that misuse their key, can do to a server: nothing to others."""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import zmq
import zmq.asyncio

from checks.link.proxy import Proxy, flipped
from megatron_opd.wire.gate import show_keys
from megatron_opd.wire.link import ends as ends_module
from megatron_opd.wire.link.events import LinkRefused, Restarted
from megatron_opd.wire.link.wire import (
    HEAD,
    PROTOCOL,
    Ack,
    Buffer,
    LinkHello,
    LinkReport,
    LinkWelcome,
    Ping,
    RefusalNote,
    State,
    note,
    read_note,
    seed_of,
)
from megatron_opd.wire.sockets import WireSocket
from tests.support.link_ends import (
    OTHER_KEYS,
    SERVER_KEYS,
    SITE_KEYS,
    Ends,
    drive,
    ends,
    event,
    link_config,
    message,
)

NOTHING = State((0, 0), (0, 0), 0, 1 << 20)
PROCESS = b"p" * 16


async def refused(net: Ends, least: int = 1) -> None:
    """Wait until so many connections were refused."""
    while net.server.connections_refused < least:  # noqa: ASYNC110  a count has no event
        await asyncio.sleep(0.01)


async def still_serves(net: Ends) -> None:
    other = net.client(keys=OTHER_KEYS)
    await other.send([b"still here"])
    assert await message(net.server) == b"still here"


def test_an_unknown_key_is_refused_and_counted():
    async def body() -> None:
        async with ends() as net:
            stranger = net.client(keys=zmq.curve_keypair())
            await stranger.send([b"let me in"])
            with pytest.raises(LinkRefused, match="the server does not know this key"):
                await stranger.next()
            await refused(net)
            assert net.server.keys_refused == {"127.0.0.1": 1}
            await still_serves(net)

    drive(body)


def test_a_server_with_another_key_is_told_nothing(caplog: pytest.LogCaptureFixture):
    async def body() -> None:
        async with ends() as net:
            lost = net.client(server_key=zmq.curve_keypair()[0])
            await lost.send([b"secret"])
            await refused(net, 2)  # it tries again
            assert net.server.counts("site").connections == 0
            assert lost.counts().connections == 0
            assert lost.counts().waiting_bytes > 0
            await still_serves(net)

    drive(body)
    assert SITE_KEYS[0].decode() not in caplog.text


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 70_000, b""], ids=len
)
def test_bytes_of_a_stranger_are_refused(data: bytes):
    async def body() -> None:
        async with ends() as net:
            _, writer = await asyncio.open_connection("127.0.0.1", net.port)
            writer.write(data)
            await writer.drain()
            writer.close()
            await refused(net)
            await still_serves(net)

    drive(body)


def test_recorded_bytes_are_refused():
    async def body() -> None:
        async with ends() as net:
            proxy = Proxy(net.port, recorded=[])
            client = net.client(await proxy.start())
            await client.send([b"once"])
            assert await message(net.server) == b"once"
            before = net.server.counts("site")
            recorded = b"".join(proxy.recorded or ())
            assert len(recorded) > 500
            _, writer = await asyncio.open_connection("127.0.0.1", net.port)
            writer.write(recorded)
            await writer.drain()
            await refused(net)
            writer.close()
            await client.send([b"twice"])
            assert await message(net.server) == b"twice"
            assert net.server.counts("site").connections == before.connections
            await proxy.close()

    drive(body)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the kernel does not count bytes")
def test_a_message_without_end_is_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(ends_module, "BUFFERS_BYTES", 1 << 20)
    frames = [bytes(1 << 17)] * 1600

    async def body() -> None:
        async with ends(link_config(chunk_bytes=1 << 17)) as net:
            sound = net.client(keys=OTHER_KEYS)
            context = zmq.Context()
            endless = context.socket(zmq.DEALER)
            endless.set(zmq.LINGER, 0)
            endless.set(zmq.RECONNECT_IVL, -1)
            show_keys(endless, SERVER_KEYS[0], SITE_KEYS[1])
            endless.connect(net.server.address)
            endless.send_multipart(frames, copy=False)
            try:
                await refused(net)
            finally:
                context.destroy(linger=0)
            assert "a message without end" in caplog.text
            assert not net.server.counts("site").refused, "it was never whole"
            for number in range(20):  # more than may come without a whole message, but whole
                await sound.send([number.to_bytes(1, "big") * (1 << 20)])
                assert len(await message(net.server)) == 1 << 20
            assert sound.counts().connections == 1

    drive(body)


def test_flipped_bits_on_the_way_end_a_connection_and_change_nothing():
    async def body() -> None:
        async with ends(link_config(silence_s=0.5)) as net:
            proxy = Proxy(net.port, flip=0.05, chance=random.Random(5))
            client = net.client(await proxy.start())
            sent = [random.Random(n).randbytes(30_000) for n in range(20)]
            for text in sent:
                await client.send([text])
            assert [await message(net.server) for _ in sent] == sent
            assert proxy.flips > 0
            await proxy.close()

    drive(body)


class Raw:
    """A peer that has a key, and says what it likes."""

    def __init__(self, net: Ends, keys: tuple[bytes, bytes] = SITE_KEYS) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RECONNECT_IVL, -1)
        show_keys(self.socket, SERVER_KEYS[0], keys[1])
        self.socket.connect(net.server.address)
        self.seed = 0

    async def greet(self, state: State = NOTHING, knows: bytes = b"", number: int = 1) -> None:
        report = LinkReport(PROTOCOL, PROCESS, knows, state, 1 << 20, 1 << 20)
        await self.socket.send(note(LinkHello(report, number), 0))
        welcome = await self.hear()
        assert isinstance(welcome, LinkWelcome)
        self.seed = seed_of(PROCESS, welcome.report.process, number)
        self.server = welcome.report.process

    async def hear(self) -> object:
        frames = await self.socket.recv_multipart()
        seed = seed_of(self.server, PROCESS, 1) if self.seed else 0
        return read_note(frames[0], seed)

    async def refusal(self) -> str:
        while True:
            found = await self.hear()
            if isinstance(found, RefusalNote):
                return found.cause

    def close(self) -> None:
        self.context.destroy(linger=0)


def bad_chunk(size: int, start: int = 0) -> list[bytes]:
    return [HEAD.pack(0, 0, size, start) + bytes(8), bytes(size)]


HOSTILE: dict[str, Sequence[bytes]] = {
    "garbage": [b"garbage"],
    "nothing": [b""],
    "a bad chunk": bad_chunk(10),
    "three frames": [b"1", b"2", b"3"],
    "many frames": [b"x"] * 1000,
    "a greeting that cannot be read": [note(LinkHello(NOTHING, 1), 0)],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("greeted", [False, True], ids=["before a greeting", "after one"])
@pytest.mark.parametrize("what", HOSTILE)
def test_frames_of_a_keyed_peer_that_cannot_be_are_counted(what: str, greeted: bool):
    async def body() -> None:
        async with ends() as net:
            raw = Raw(net)
            if greeted:
                await raw.greet()
            await raw.socket.send_multipart(HOSTILE[what])
            while not net.server.counts("site").refused:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert sum(net.server.counts("site").refused.values()) == 1
            await still_serves(net)
            raw.close()

    drive(body)


def sealed(raw: Raw, text: bytes) -> list[bytes]:
    """A chunk of the first bytes of the urgent lane, with its right checksum."""
    from megatron_opd.wire.link.wire import Packer

    return [bytes(frame) for frame in Packer(0).frames(0, 0, [memoryview(text)], raw.seed)]


@pytest.mark.parametrize("what", ["a large message", "a false acknowledgement", "a refusal"])
def test_a_keyed_peer_that_breaks_the_rules_is_told_and_not_heard_again(what: str):
    async def body() -> None:
        async with ends(message_bytes=1000) as net:
            raw = Raw(net)
            await raw.greet()
            if what == "a large message":
                await raw.socket.send_multipart(sealed(raw, struct.pack("<IQ", 1, 1001)))
                words = "a message of 1001 bytes, above 1000"
            elif what == "a refusal":
                await raw.socket.send(note(RefusalNote("go"), 0))
                words = "it refuses its server"
            else:
                await raw.socket.send(note(Ack(State((9, 0), (0, 0), 0, 1)), raw.seed))
                words = "it acknowledged bytes that were never sent"
            assert await raw.refusal() == words
            raw.close()
            again = Raw(net)
            report = LinkReport(PROTOCOL, PROCESS, b"", NOTHING, 1 << 20, 1 << 20)
            await again.socket.send(note(LinkHello(report, 2), 0))
            assert await again.refusal() == "a newer process has the name site"
            again.close()
            await still_serves(net)
            assert net.server.counts("site").refused[words] == 1
            good = net.client()  # another process of the same site
            await good.send([b"better"])
            assert await message(net.server) == b"better"

    drive(body)


def test_another_protocol_is_refused_in_one_line():
    async def body() -> None:
        async with ends() as net:
            raw = Raw(net)
            report = LinkReport(PROTOCOL + 1, PROCESS, b"", NOTHING, 1 << 20, 1 << 20)
            await raw.socket.send(note(LinkHello(report, 1), 0))
            expected = f"it speaks protocol {PROTOCOL + 1} of the link, not {PROTOCOL}"
            assert await raw.refusal() == expected
            raw.close()
            await still_serves(net)

    drive(body)


def test_a_frame_above_the_limit_ends_its_connection():
    async def body() -> None:
        async with ends(link_config(chunk_bytes=50_000)) as net:
            raw = Raw(net)
            await raw.greet()
            monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            await raw.socket.send_multipart(bad_chunk(60_000))
            await monitor.poll()
            assert net.server.counts("site").chunks_received == 0
            raw.socket.disable_monitor()
            monitor.close(linger=0)
            raw.close()
            await still_serves(net)

    drive(body)


def test_a_peer_that_asks_and_does_not_read_is_not_answered_for_ever():
    async def body() -> None:
        async with ends() as net:
            raw = Raw(net)
            await raw.greet()
            for number in range(20_000):
                await raw.socket.send(note(Ping(number), raw.seed))
            await still_serves(net)
            raw.close()

    drive(body)


def test_an_old_connection_is_not_heard_once_there_is_a_newer_one():
    async def body() -> None:
        async with ends() as net:
            old, new = Raw(net), Raw(net)
            await old.greet(number=1)
            await new.greet(number=2)
            await old.socket.send_multipart(sealed(old, b"late"))
            await old.socket.send(note(Ping(1), new.seed))
            while sum(net.server.counts("site").refused.values()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert net.server.counts("site").chunks_received == 0
            for raw in (old, new):
                raw.close()

    drive(body)


def test_faults_below_the_encryption_change_nothing(monkeypatch: pytest.MonkeyPatch):
    """Frames damaged, repeated, replayed and lost inside both ends' own processes."""
    chance, recorded, send = random.Random(11), list[list[Buffer]](), WireSocket[Any]._send
    done = dict.fromkeys(("damaged", "repeated", "replayed", "lost"), 0)

    def faulty(end: WireSocket[Any], frames: Sequence[Buffer]) -> None:
        what = chance.choice([*done, *[""] * 12])
        kept = [bytes(frame) for frame in frames]
        if len(kept) < 2 or not kept[-1]:  # greetings of clients
            return send(end, frames)
        recorded.append(kept)
        done[what] = done.get(what, 0) + 1
        if what == "damaged":
            return send(end, [*kept[:-1], flipped(kept[-1], chance)])
        if what in ("repeated", "replayed"):
            other = chance.choice(recorded) if what == "replayed" else kept
            with contextlib.suppress(zmq.ZMQError):  # it may name no connection
                send(end, [*kept[:-2], *other[-2:]])
        return None if what == "lost" else send(end, kept)

    monkeypatch.setattr(WireSocket, "_send", faulty)

    async def body() -> None:
        async with ends(link_config(chunk_bytes=16_384)) as net:
            client = net.client()
            assert await client.next() == Restarted("server")
            sent = [chance.randbytes(chance.choice((10, 40_000))) for _ in range(60)]
            for text in sent:
                await client.send([text])
                await net.server.send("site", [text])
            assert [await message(net.server) for _ in sent] == sent
            assert [await message(client) for _ in sent] == sent
            assert min(done[what] for what in ("damaged", "repeated", "replayed", "lost")) > 0
            await asyncio.sleep(0)
            assert await event_free(net)

    drive(body)


async def event_free(net: Ends) -> bool:
    """Whether nothing more comes."""
    try:
        async with asyncio.timeout(0.3):
            await event(net.server, Restarted)
    except TimeoutError:
        return True
    return False


def test_a_connection_that_says_nothing_holds_nothing_up():
    async def body() -> None:
        async with ends() as net:
            silent = [socket.create_connection(("127.0.0.1", net.port)) for _ in range(50)]
            await still_serves(net)
            for one in silent:
                one.close()
            await refused(net, 50)

    drive(body)
