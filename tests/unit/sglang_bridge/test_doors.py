"""`opd watch` closes connections that ask too slowly, and leaves a browser's alone."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from megatron_opd.report.run_files import RunFiles
from megatron_opd.watch import serving
from megatron_opd.watch.serving import listen, serve
from sglang_bridge.arrivals import Arrivals
from sglang_bridge.refusals import Refusals
from tests.support.slow_client import HEAD_S, LIMIT_S, closed, dripped
from tests.support.watched_run import write_run

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Open = Callable[[bytes], Awaitable[Connection]]


def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: Callable[[Open, str], Awaitable[None]]
) -> int:
    """Call `body` with what opens a connection and sends bytes, and the cookie with the token.

    Returns how many were refused.
    """
    counted: list[Refusals] = []

    def arrivals(refusals: Refusals, most_strangers: int) -> Arrivals:
        counted.append(refusals)
        return Arrivals(refusals, head_s=HEAD_S, most_strangers=most_strangers)

    monkeypatch.setattr(serving, "Arrivals", arrivals)
    files = RunFiles(write_run(tmp_path / "run", updates=1, per_update=1))

    async def main() -> None:
        said: list[str] = []
        kept: list[asyncio.StreamWriter] = []  # one that nobody holds closes its connection
        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            task = asyncio.create_task(serve(files, listener, "127.0.0.1", said.append))
            while not said:  # noqa: ASYNC110  a list has no event
                await asyncio.sleep(0.01)
            token = next(line for line in said if "token=" in line).partition("token=")[2]

            async def opened(first: bytes) -> Connection:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(first)
                kept.append(writer)
                return reader, writer

            await body(opened, f"opd_watch_{port}={token}")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    return counted[0].count


def request(cookie: str = "") -> bytes:
    shown = f"Cookie: {cookie}\r\n" if cookie else ""
    return f"GET /api/evaluations HTTP/1.1\r\nHost: 127.0.0.1\r\n{shown}\r\n".encode()


async def status(reader: asyncio.StreamReader) -> int:
    """The status of the next answer, which is read."""
    async with asyncio.timeout(LIMIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        fields = [line.split(b": ") for line in head.lower().split(b"\r\n")]
        sizes = [int(field[1]) for field in fields if field[0] == b"content-length"]
        await reader.readexactly(sizes[0])
    return int(head.split(b" ", 2)[1])


def test_who_asks_slowly_is_cut_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def body(opened: Open, cookie: str) -> None:
        reader, writer = await opened(b"GET / HTTP/1.1\r\nX: ")
        assert await dripped(reader, writer, b"x" * 100_000) == b""

    watched(tmp_path, monkeypatch, body)
    assert "refused by opd watch: a request that came too slowly (1 so far)" in caplog.text


def test_who_asks_nothing_is_cut_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def body(opened: Open, cookie: str) -> None:
        reader, _ = await opened(b"")
        assert await closed(reader) == b""

    watched(tmp_path, monkeypatch, body)
    assert "refused by opd watch: a connection without a request (1 so far)" in caplog.text


def test_only_who_has_the_token_may_be_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def body(opened: Open, cookie: str) -> None:
        reader, writer = await opened(request(cookie))
        assert await status(reader) == 200
        stranger, _ = await opened(request())
        assert await status(stranger) == 403
        assert await closed(stranger) == b""
        await asyncio.sleep(2 * HEAD_S)
        writer.write(request(cookie))
        assert await status(reader) == 200
        assert await dripped(reader, writer, b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000) == b""

    assert watched(tmp_path, monkeypatch, body) == 3


def test_an_answer_may_take_as_long_as_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answer, asked = asyncio.Event(), asyncio.Event()

    async def slowly(self: object, request: object) -> serving.web.Response:
        asked.set()
        await answer.wait()
        return serving.web.Response(text="late")

    monkeypatch.setattr(serving.WatchServer, "_evaluations", slowly)

    async def body(opened: Open, cookie: str) -> None:
        reader, _ = await opened(request(cookie))
        async with asyncio.timeout(LIMIT_S):
            await asked.wait()
        silent, _ = await opened(b"")
        await closed(silent)
        answer.set()
        assert await status(reader) == 200

    assert watched(tmp_path, monkeypatch, body) == 1
