"""HTTP to one server: one pool, a limit on every wait, retries only where they do no harm."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from sglang_bridge.errors import BadReply, ServerRefused, ServerUnreachable

# Below the server's own keep-alive (600 s, or 5 s where it was started by other means), so that a
# pooled connection is never one it is just closing.
KEEPALIVE_S = 2.0
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """attempts: tries in all. first_wait_s: pause before the second, doubled each time."""

    attempts: int = 4
    first_wait_s: float = 0.25


class HttpConnection:
    """Requests to `url`.

    A retry may follow only a request that is safe to repeat, or that was never sent.
    """

    def __init__(self, url: str, *, timeout_s: float, retry: RetryPolicy | None = None) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._retry = RetryPolicy() if retry is None else retry
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """GET: a read, repeated after transport errors."""
        return await self.request("GET", path, None, timeout_s=timeout_s, repeatable=True)

    async def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout_s: float | None = None,
        repeatable: bool,
        retry_unsent: bool = True,
    ) -> Any:
        """The decoded JSON (None for an empty or non-JSON body).

        repeatable: the request may reach the server twice, but not after `timeout_s` of silence.
        retry_unsent: it may be tried again when
        no connection was made. Raises ServerUnreachable, ServerRefused, BadReply.
        """
        wait_s = self._retry.first_wait_s
        for attempt in range(1, self._retry.attempts + 1):
            try:
                return await self._once(method, path, body, timeout_s or self._timeout_s)
            except ServerUnreachable as error:
                again = repeatable or (retry_unsent and not error.sent)
                # a silent server has used up its time; who wants to wait as long again says so
                again = again and not (error.sent and error.timed_out)
                if not again or attempt == self._retry.attempts:
                    raise
            await asyncio.sleep(wait_s)
            wait_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def close(self) -> None:
        """Closes the pool. The connection can be used again after."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _once(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        url = f"{self.url}{path}"
        try:
            session = self._open()
            async with session.request(method, url, data=data, timeout=limits) as reply:
                raw = await reply.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerUnreachable(self.url, path, _cause(error), sent=False) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnreachable(self.url, path, _cause(error), sent=True) from error
        if reply.status != 200:
            raise ServerRefused(self.url, path, reply.status, _explanation(raw))
        if not raw or reply.content_type != "application/json":
            return None
        try:
            return msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise BadReply(f"{url}: the reply is no JSON ({error})") from error

    def _open(self) -> aiohttp.ClientSession:
        """The session, made inside the running loop on first use."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector, headers={"Content-Type": "application/json"}
            )
        return self._session


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _explanation(raw: bytes) -> str:
    """The message inside one of SGLang's error bodies, or the body itself."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw.decode("utf-8", errors="replace")
    while isinstance(body, dict):
        inner = next((body[key] for key in ("error", "message") if body.get(key)), None)
        if inner is None:
            break
        body = inner
    return body if isinstance(body, str) else raw.decode("utf-8", errors="replace")
