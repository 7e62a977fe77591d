"""Speaks HTTP to one server: one pool, one try a request, limits on every wait and reply.

What answers is not trusted: replies are read up to a limit, compressed ones and redirects are
refused, and whatever cannot be decoded raises BadReply. Nothing is repeated here, see
sglang_bridge.retry.
"""

from __future__ import annotations

import math
from typing import Any

import aiohttp
import msgspec

from sglang_bridge.errors import BadReply, ServerRefused, ServerUnreachable, one_line
from sglang_bridge.retry_after import retry_after_s

# Below the server's own keep-alive (600 s, or 5 s where it was started by other means), so that a
# pooled connection is never one it is just closing.
KEEPALIVE_S = 2.0
CONNECT_TIMEOUT_S = 10.0
JSON_TYPE = "application/json"
CHUNK_BYTES = 1 << 16
# Limit on an answer whose size the request does not decide.
REPLY_BYTES = 16 << 20
# Limit on the explanation of an error status.
EXPLANATION_BYTES = 1 << 16
UNAUTHORIZED, FORBIDDEN = 401, 403
# Too many requests, or none at present: what may say when to come back.
BUSY = (429, 503)


class HttpConnection:
    """Sends requests to `url`. timeout_s: the longest wait for a whole reply.

    api_key: sent as a bearer token; it appears in no message of ours.
    """

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Sends a GET request; see `request`."""
        return await self.request("GET", path, None, timeout_s=timeout_s)

    async def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout_s: float | None = None,
        max_bytes: int = REPLY_BYTES,
    ) -> Any:
        """Returns the decoded JSON (None for an empty or non-JSON body) of at most `max_bytes`.

        timeout_s: instead of this connection's; inf waits for ever. Raises ServerUnreachable,
        ServerRefused, BadReply.
        """
        data = None if body is None else msgspec.json.encode(body)
        limit_s = timeout_s or self.timeout_s
        kind, raw = await self._send(method, path, data, JSON_TYPE, limit_s, max_bytes)
        if not raw or kind != JSON_TYPE:
            return None
        try:
            return msgspec.json.decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadReply(f"{self.url}{path}: the reply is not JSON ({error})") from error

    async def exchange(
        self, path: str, content_type: str, body: bytes, *, timeout_s: float, max_bytes: int
    ) -> Any:
        """Posts msgpack as `content_type` and returns the decoded msgpack of the reply.

        Bounds and errors: see `request`; another type of reply raises BadReply.
        """
        kind, raw = await self._send("POST", path, body, content_type, timeout_s, max_bytes)
        url = f"{self.url}{path}"
        if kind != content_type:
            raise BadReply(f"{url}: the reply must be {content_type}, got {one_line(kind, 60)}")
        try:
            return msgspec.msgpack.decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadReply(f"{url}: the reply is not msgpack ({error})") from error

    async def _send(
        self,
        method: str,
        path: str,
        data: bytes | None,
        content_type: str,
        limit_s: float,
        max_bytes: int,
    ) -> tuple[str, bytearray]:
        """Returns the type and the bytes of the reply to one try."""
        limits = aiohttp.ClientTimeout(
            total=None if limit_s == math.inf else limit_s, sock_connect=CONNECT_TIMEOUT_S
        )
        url = f"{self.url}{path}"
        try:
            async with self._open().request(
                method,
                url,
                data=data,
                headers={"Content-Type": content_type},
                timeout=limits,
                allow_redirects=False,
            ) as reply:
                if reply.status != 200:
                    raise await self._refusal(path, reply)
                return reply.content_type, await _read(url, reply, max_bytes)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerUnreachable(self.url, path, _cause(error), sent=False) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnreachable(self.url, path, _cause(error), sent=True) from error

    async def close(self) -> None:
        """Closes the pool. The connection can be used again after."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _refusal(self, path: str, reply: aiohttp.ClientResponse) -> ServerRefused:
        if 300 <= reply.status < 400:
            where = reply.headers.get("Location", "nowhere")
            text = f"a redirect to {where}; redirects are not followed"
        elif reply.status in (UNAUTHORIZED, FORBIDDEN):
            sent = (
                "the API key sent is not the server's" if self._api_key else "no API key was sent"
            )
            text = f"{sent}; api_key_env names the environment variable that holds it"
        else:
            text = _explanation(await _read_some(reply))
        again_s = None
        if reply.status in BUSY:
            again_s = retry_after_s(reply.headers.get("Retry-After"))
        return ServerRefused(self.url, path, reply.status, text, again_s)

    def _open(self) -> aiohttp.ClientSession:
        """Returns the session, made inside the running loop on first use."""
        if self._session is None:
            headers = {"Accept-Encoding": "identity"}
            if self._api_key is not None:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._session = aiohttp.ClientSession(
                # limit=0: as many connections as there are requests; the caller bounds those
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session


async def _read(url: str, reply: aiohttp.ClientResponse, max_bytes: int) -> bytearray:
    """Reads the body, no further than `max_bytes`. Raises BadReply."""
    encoding = reply.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise BadReply(f"{url}: the reply is encoded as {encoding}, which was not requested")
    too_large = BadReply(f"{url}: the reply is larger than {max_bytes} bytes")
    if (reply.content_length or 0) > max_bytes:
        raise too_large
    raw = bytearray()
    async for chunk in reply.content.iter_chunked(CHUNK_BYTES):
        raw += chunk
        if len(raw) > max_bytes:
            raise too_large
    return raw


async def _read_some(reply: aiohttp.ClientResponse) -> bytes:
    """Reads the first EXPLANATION_BYTES of the body, or all of it."""
    raw = bytearray()
    async for chunk in reply.content.iter_chunked(CHUNK_BYTES):
        raw += chunk
        if len(raw) >= EXPLANATION_BYTES:
            break
    return bytes(raw[:EXPLANATION_BYTES])


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _explanation(raw: bytes) -> str:
    """Returns the message inside one of SGLang's error bodies, or the body itself."""
    text = raw.decode("utf-8", errors="replace")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return text
    while isinstance(body, dict):
        inner = next((body[key] for key in ("error", "message") if body.get(key)), None)
        if inner is None:
            break
        body = inner
    return body if isinstance(body, str) else text
