"""Closes what SGLang leaves open beside an API key, and counts who is refused.

SGLang lets every path that begins with /health, /ready or /metrics through, all OPTIONS requests
and every websocket. /health_generate samples a token, and /v1/realtime is a websocket. Here only
the probes themselves are open. Pure ASGI: a client that leaves is noticed as before.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sglang_bridge import wire
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

ADMITTED = "sglang_bridge.admitted"
"""Set in the scope of a request that came with the key."""
OPEN = frozenset({"/health", "/ready", "/metrics", "/metrics/", wire.PROOF_ROUTE})
PROBES = frozenset({"GET", "HEAD"})
_BODY = b'{"error":"Unauthorized"}'
_HEADERS = [(b"content-type", b"application/json"), (b"connection", b"close")]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class KeyGuard:
    """Answers 401 to every request without the key, before its body is read."""

    def __init__(self, app: App, key: str, refusals: Refusals) -> None:
        self._app, self._key = app, f"bearer {key}".encode()
        self.refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "lifespan" and self._has_key(scope):
            scope[ADMITTED] = True
        elif scope["type"] != "lifespan" and not is_probe(scope):
            await self._refuse(scope, send)
            return
        await self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        self.refusals.add("a request without the API key")
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "http.response.start", "status": 401, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _BODY})

    def _has_key(self, scope: Scope) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(shown) != 1:
            return False
        kind, space, key = shown[0].partition(b" ")
        return hmac.compare_digest(kind.lower() + space + key, self._key)


def is_probe(scope: Scope) -> bool:
    """Return whether a request only asks whether the server is there."""
    probe = scope["type"] == "http" and scope["method"] in PROBES
    return probe and scope["path"] in OPEN


def guard_requests(key: str, refusals: Refusals) -> None:
    """Put the guard before SGLang's own check; call before SGLang's run_server().

    refusals: counts those without the key. RuntimeError: SGLang has no such check any more.
    """
    from sglang.srt.utils import auth

    ours: Any = auth
    theirs = getattr(auth, "add_api_key_middleware", None)
    if theirs is None:
        raise RuntimeError("sglang.srt.utils.auth has no add_api_key_middleware: another version")

    def add(app: Any, **keys: Any) -> None:
        theirs(app, **keys)
        app.add_middleware(
            KeyGuard, key=key, refusals=refusals
        )  # the last one added is the first one asked

    ours.add_api_key_middleware = add
