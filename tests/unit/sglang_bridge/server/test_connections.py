"""Connections of a real uvicorn server: who is slow is closed and counted, who waits is not."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from sglang_bridge.arrivals import Arrivals
from sglang_bridge.refusals import Refusals
from sglang_bridge.server import connections
from sglang_bridge.server.auth import KeyGuard
from tests.support.slow_client import HEAD_S, LIMIT_S, closed, dripped

KEY = "secret-key"
LEAST_BYTES_S = 1000.0
MOST = 3
logger = logging.getLogger("test_connections")


class Echo(asyncio.Protocol):
    """Stands in for the protocol of websockets, once a connection is one."""

    def __init__(self, **state: Any) -> None:
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not data.startswith(b"GET"):
            self.transport.write(data)


class App:
    """A server's application. /wait is answered when `go` is set, /early before its body is read.

    read: bodies, by path.
    """

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()
        self.read: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["path"] == "/wait":
            self.waiting.set()
            await self.go.wait()
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.read.append((scope["path"], body))
        length = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"ok"})


@dataclass
class Served:
    """A server, what it serves, and who connects to it."""

    app: App
    arrivals: Arrivals
    port: int

    @property
    def refused(self) -> int:
        return self.arrivals.refusals.count

    async def connect(self, first: bytes = b"") -> "Peer":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(first)
        return Peer(reader, writer)


@dataclass
class Peer:
    """A client's end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> int:
        """The status of the next answer."""
        async with asyncio.timeout(LIMIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            if b"content-length: 2" in head:
                assert await self.reader.readexactly(2) == b"ok"
        return int(head.split(b" ", 2)[1])


def head(path: str = "/", key: str | None = KEY, length: int = 0) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {length}"]
    lines += [f"Authorization: Bearer {key}"] * (key is not None)
    return "\r\n".join([*lines, "", ""]).encode()


@contextlib.asynccontextmanager
async def server(asks_key: bool, head_s: float) -> AsyncIterator[Served]:
    app = App()
    arrivals = Arrivals(Refusals(logger, "by this server"), head_s, LEAST_BYTES_S, MOST)
    guarded: Any = KeyGuard(app, KEY, arrivals.refusals) if asks_key else app
    connections.guard_connections(arrivals, asks_key=asks_key)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(guarded, ws=Echo, log_config=None, timeout_keep_alive=1000)
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve([listener]))
    try:
        yield Served(app, arrivals, listener.getsockname()[1])
    finally:
        app.go.set()
        running.should_exit = running.force_exit = True
        await asyncio.wait_for(task, LIMIT_S)


Body = Callable[[Served], Awaitable[None]]


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test beside a server."""
    monkeypatch.setattr(uvicorn.Config, "load", uvicorn.Config.load)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "filters", [])

    def run(body: Body, *, asks_key: bool = True, head_s: float = HEAD_S) -> None:
        async def main() -> None:
            async with server(asks_key, head_s) as served:
                await body(served)

        asyncio.run(main())

    return run


@pytest.mark.parametrize("asks_key", [True, False])
def test_a_head_that_drips_is_cut_and_counted(
    drive: Callable[..., None], asks_key: bool, caplog: pytest.LogCaptureFixture
):
    async def body(served: Served) -> None:
        peer = await served.connect()
        assert (
            await dripped(peer.reader, peer.writer, b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000)
            == b""
        )
        assert served.refused == 1

    drive(body, asks_key=asks_key)
    assert "a request that came too slowly (1 so far)" in caplog.text


def test_a_connection_that_says_nothing_is_cut_and_counted(
    drive: Callable[..., None], caplog: pytest.LogCaptureFixture
):
    async def body(served: Served) -> None:
        peer = await served.connect()
        assert await closed(peer.reader) == b""
        assert served.refused == 1
        assert served.arrivals.strangers == 0

    drive(body)
    assert "a connection without a request (1 so far)" in caplog.text


@pytest.mark.parametrize("asks_key", [True, False])
def test_a_body_that_drips_is_cut_and_counted(
    drive: Callable[..., None], asks_key: bool, caplog: pytest.LogCaptureFixture
):
    async def body(served: Served) -> None:
        peer = await served.connect(head(length=10**6))
        assert await dripped(peer.reader, peer.writer, b"b" * 100_000) == b""
        assert served.refused == 1
        assert served.app.read == []

    drive(body, asks_key=asks_key)
    assert "a body that came too slowly (1 so far)" in caplog.text


def test_what_follows_an_early_answer_has_no_longer_than_a_head(drive: Callable[..., None]):
    async def body(served: Served) -> None:
        peer = await served.connect(head("/early", length=10**6))
        assert await peer.answer() == 200
        await dripped(peer.reader, peer.writer, b"b" * 100_000)
        assert served.refused == 1

    drive(body)


def test_a_body_that_keeps_up_is_read_whole(drive: Callable[..., None]):
    """It takes several times as long as a head may, at more than the least rate."""

    async def body(served: Served) -> None:
        size, chunk = 40_000, 10_000
        peer = await served.connect(head(length=size))
        for _ in range(size // chunk):
            peer.send(b"b" * chunk)
            await asyncio.sleep(HEAD_S)
        assert await peer.answer() == 200
        assert [len(read) for _, read in served.app.read] == [size]
        assert served.refused == 0

    drive(body)


@pytest.mark.parametrize("path", ["/", "/health"])
def test_a_known_client_may_be_idle_and_a_stranger_may_not(drive: Callable[..., None], path: str):
    async def body(served: Served) -> None:
        stranger = await served.connect(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        known = await served.connect(head(path))
        assert await known.answer() == await stranger.answer() == 200
        assert await closed(stranger.reader) == b""
        assert served.refused == 1
        await asyncio.sleep(2 * HEAD_S)
        known.send(head())
        assert await known.answer() == 200
        assert served.refused == 1

    drive(body)


def test_without_a_key_who_was_answered_may_be_idle(drive: Callable[..., None]):
    async def body(served: Served) -> None:
        peer = await served.connect(head(key=None))
        assert await peer.answer() == 200
        silent = await served.connect()
        await closed(silent.reader)  # so long nobody waits who is not known
        peer.send(head(key=None))
        assert await peer.answer() == 200
        assert served.refused == 1

    drive(body, asks_key=False)


def test_the_next_head_of_a_known_client_may_not_drip_either(drive: Callable[..., None]):
    async def body(served: Served) -> None:
        peer = await served.connect(head())
        assert await peer.answer() == 200
        await dripped(peer.reader, peer.writer, b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000)
        assert served.refused == 1

    drive(body)


def test_an_answer_may_take_as_long_as_it_takes(drive: Callable[..., None]):
    async def body(served: Served) -> None:
        peer = await served.connect(head("/wait"))
        async with asyncio.timeout(LIMIT_S):
            await served.app.waiting.wait()
        silent = await served.connect()
        await closed(silent.reader)
        served.app.go.set()
        assert await peer.answer() == 200
        assert served.refused == 1

    drive(body)


def test_requests_that_come_before_their_turn_are_answered(drive: Callable[..., None]):
    async def body(served: Served) -> None:
        peer = await served.connect(head() + head("/wait") + head())
        assert await peer.answer() == 200
        silent = await served.connect()
        await closed(silent.reader)
        served.app.go.set()
        assert await peer.answer() == await peer.answer() == 200

    drive(body)


def test_of_too_many_that_wait_the_oldest_goes(
    drive: Callable[..., None], caplog: pytest.LogCaptureFixture
):
    async def body(served: Served) -> None:
        known = await served.connect(head())
        assert await known.answer() == 200
        strangers = [await served.connect(b"GET") for _ in range(MOST + 2)]
        for peer in strangers[:2]:
            assert await closed(peer.reader) == b""
        assert served.refused == 2
        assert served.arrivals.strangers == MOST
        late = await served.connect(head())
        assert await late.answer() == 200
        known.send(head())
        assert await known.answer() == 200
        for peer in strangers:
            peer.writer.close()

    drive(body, head_s=1000.0)
    assert "one of too many connections without a key" in caplog.text


def test_a_connection_that_ends_is_forgotten(drive: Callable[..., None]):
    async def body(served: Served) -> None:
        peer = await served.connect(b"GET")
        async with asyncio.timeout(LIMIT_S):
            while not served.arrivals.strangers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            peer.writer.close()
            while served.arrivals.strangers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert served.refused == 0

    drive(body, head_s=1000.0)


def test_a_websocket_has_no_clock(drive: Callable[..., None]):
    """Who is let in there is the application's to say: it is asked at once."""

    async def body(served: Served) -> None:
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        peer = await served.connect(b"GET /ws HTTP/1.1\r\nHost: h\r\n" + upgrade)
        silent = await served.connect()
        await closed(silent.reader)
        peer.send(b"ping")
        async with asyncio.timeout(LIMIT_S):
            assert await peer.reader.readexactly(4) == b"ping"
        assert served.refused == 1
        peer.writer.close()

    drive(body)


def test_a_request_with_the_key_behind_a_probe_is_answered(drive: Callable[..., None]):
    async def body(served: Served) -> None:
        peer = await served.connect(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n" + head("/wait"))
        assert await peer.answer() == 200
        silent = await served.connect()
        await closed(silent.reader)
        served.app.go.set()
        assert await peer.answer() == 200
        assert served.refused == 1

    drive(body)


def test_what_is_not_http_is_counted_and_not_logged_each_time(
    drive: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
):
    async def body(served: Served) -> None:
        for _ in range(3):
            peer = await served.connect(b"\x1b[31m\r\n\r\n")
            assert b" 400 " in await closed(peer.reader)
        assert served.refused == 3

    drive(body)
    assert "what is not HTTP (1 so far)" in caplog.text
    assert "Invalid HTTP" not in capfd.readouterr().err


def test_another_uvicorn_is_noticed():
    class Other(asyncio.Protocol):
        pass

    arrivals = Arrivals(Refusals(logger, ""))
    with pytest.raises(RuntimeError, match="no on_response_complete"):
        connections.guarded(Other, arrivals, asks_key=True)
