"""A server that floods, packs, redirects or babbles is refused, with one printable line."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sglang_bridge import wire
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BadReply, BridgeError, ServerRefused, ServerUnreachable
from sglang_bridge.http import REPLY_BYTES, HttpConnection
from sglang_bridge.retry import Backoff
from tests.support.bridge_replies import REQUEST, SCORE_REQUEST, FakeServer, Handler, answering

ONCE = Backoff(attempts=1)
DEEP = b"[" * 200_000 + b"]" * 200_000


def ask(handler: Handler, api_key: str | None = None) -> object:
    """What `handler` answers, through a connection."""

    async def run() -> object:
        async with FakeServer({"/x": handler}) as server:
            http = HttpConnection(server.url, timeout_s=20, api_key=api_key)
            try:
                return await http.get("/x")
            finally:
                await http.close()

    return asyncio.run(run())


def body(raw: bytes, content_type: str = "application/json", **headers: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=raw, content_type=content_type, headers=headers)

    return handle


def test_a_flood_is_cut_early():
    """An endless reply: reading stops a little behind the limit, whatever was announced."""
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        await reply.prepare(request)
        block = b" " * (1 << 20)
        while sent < 700 << 20:
            await reply.write(block)
            sent += len(block)
        return reply

    with pytest.raises(BadReply, match=f"is larger than {REPLY_BYTES} bytes"):
        ask(flood)
    assert sent < REPLY_BYTES + (8 << 20), "the rest was never taken"


def test_an_announced_flood_is_not_read_at_all():
    async def announce(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        reply.content_length = 700 << 20
        await reply.prepare(request)
        await asyncio.sleep(0.5)
        return reply

    with pytest.raises(BadReply, match="is larger than"):
        ask(announce)


def test_the_request_decides_how_large_a_rollout_may_be():
    small = REQUEST.reply_bytes
    assert small < replace(REQUEST, num_draws=64, max_new_tokens=4096).reply_bytes
    assert small < replace(REQUEST, experts=True).reply_bytes
    assert small < 2 << 20

    async def run(call: Callable[[ServerClient], object]) -> None:
        flood = body(b" " * (3 << 20))
        async with (
            FakeServer({wire.WORK_ROUTE: flood}) as server,
            ServerClient(server.url, timeout_s=20, backoff=ONCE) as client,
        ):
            await call(client)

    for call in (lambda c: c.generate(REQUEST), lambda c: c.score(SCORE_REQUEST)):
        with pytest.raises(BadReply, match="is larger than"):
            asyncio.run(run(call))


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_packed_reply_is_refused_unread(encoding: str):
    bomb = gzip.compress(b"[" + b"0," * (4 << 20) + b"0]")
    with pytest.raises(BadReply, match=f"encoded as {encoding}"):
        ask(body(bomb, **{"Content-Encoding": encoding}))


def test_nothing_packed_is_asked_for():
    async def tell(request: web.Request) -> web.StreamResponse:
        return web.json_response(dict(request.headers))

    assert ask(tell)["Accept-Encoding"] == "identity"


REDIRECTS = {301: web.HTTPMovedPermanently, 302: web.HTTPFound, 303: web.HTTPSeeOther}
REDIRECTS |= {307: web.HTTPTemporaryRedirect, 308: web.HTTPPermanentRedirect}


@pytest.mark.parametrize("status", REDIRECTS)
def test_redirects_are_named_and_not_followed(status: int):
    async def run() -> list[str]:
        async with FakeServer({"/x": answering({})}) as elsewhere:

            async def send_away(request: web.Request) -> web.StreamResponse:
                raise REDIRECTS[status](f"{elsewhere.url}/x")

            async with FakeServer({"/x": send_away}) as server:
                http = HttpConnection(server.url, timeout_s=20, api_key="secret")
                try:
                    with pytest.raises(ServerRefused, match=f"{status}: a redirect to http") as no:
                        await http.get("/x")
                    assert no.value.status == status
                finally:
                    await http.close()
            return elsewhere.seen

    assert asyncio.run(run()) == []


@pytest.mark.parametrize(
    "raw",
    [b"{", b"\xff\xfe", b'{"a": "\xff"}', DEEP, b"NaN", b'{"a": 1e400}x', b'"\\ud800"', b"\x00"],
    ids=["cut", "bytes", "latin", "deep", "nan", "rest", "surrogate", "zero"],
)
def test_what_is_no_json_is_a_bad_reply(raw: bytes):
    with pytest.raises(BadReply, match="the reply is not JSON"):
        ask(body(raw))


def test_a_deep_explanation_is_shown_as_it_stands():
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(body=DEEP, status=500)

    with pytest.raises(ServerRefused, match=r"HTTP 500: \[\[\["):
        ask(refuse)


def test_an_endless_explanation_is_cut():
    async def refuse(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(status=500)
        await reply.prepare(request)
        while True:
            await reply.write(b"no " * 100_000)

    with pytest.raises(ServerRefused) as caught:
        ask(refuse)
    assert len(str(caught.value)) < 1000


def test_escape_codes_of_a_server_do_not_reach_the_terminal():
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "\x1b[2Jgone\u202e"}, status=500)

    with pytest.raises(ServerRefused) as caught:
        ask(refuse)
    assert str(caught.value).endswith("HTTP 500: \\x1b[2Jgone\\u202e")


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("api_key", [None, "a-secret-key"])
def test_a_wrong_key_is_told_apart_from_none_and_not_shown(status: int, api_key: str | None):
    expected = "no API key was sent" if api_key is None else "the API key sent is not the server's"
    with pytest.raises(ServerRefused, match=expected) as caught:
        ask(answering({"error": "Unauthorized"}, status), api_key)
    assert "api_key_env" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_key_is_sent_as_a_bearer_token():
    async def tell(request: web.Request) -> web.StreamResponse:
        return web.json_response(request.headers.get("Authorization"))

    assert ask(tell) is None
    assert ask(tell, "k") == "Bearer k"


@asynccontextmanager
async def babbling(raw: bytes) -> AsyncIterator[str]:
    """The url of something that answers every connection with these bytes and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(raw)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BABBLE = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=100).map(lambda raw: HEAD + b"\r\n" + raw),
    st.binary(max_size=60).map(lambda raw: HEAD + b"Content-Length: " + raw + b"\r\n\r\n{}"),
    st.binary(max_size=60).map(lambda raw: HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + raw),
    st.binary(max_size=60).map(lambda raw: b"HTTP/1.1 " + raw + b"\r\n\r\n"),
)


@given(raw=BABBLE)
@settings(max_examples=150, deadline=None)
def test_whatever_bytes_come_the_error_is_one_of_ours(raw: bytes):
    async def run() -> list[str]:
        said = []
        async with babbling(raw) as url, ServerClient(url, timeout_s=5, backoff=ONCE) as client:
            for call in (client.generate(REQUEST), client.version(), client.pause()):
                try:
                    await call
                except BridgeError as error:
                    said.append(str(error))
        return said

    assert all(map(str.isprintable, asyncio.run(run())))


def test_a_server_that_is_silent_at_the_start_is_not_waited_for_as_for_work(
    monkeypatch: pytest.MonkeyPatch,
):
    """Before: request_timeout_s, ten minutes by default, in silence."""
    monkeypatch.setattr("sglang_bridge.client.INFO_TIMEOUT_S", 0.05)

    async def run() -> None:
        stop = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await stop.wait()
            writer.close()

        listener = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with ServerClient(f"http://127.0.0.1:{port}", timeout_s=600) as client:
            try:
                async with asyncio.timeout(20):
                    with pytest.raises(ServerUnreachable, match="Timeout"):
                        await client.info()
            finally:
                stop.set()
                listener.close()

    asyncio.run(run())
