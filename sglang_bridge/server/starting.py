"""Refuses what changes a server's state until it has sampled its own first token.

SGLang samples one after it listens, and is up when that has come. A pause before, as one that was
meant for the server that had the port a second ago, would stop it for ever. Pure ASGI: a client
that leaves is noticed as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sglang_bridge import wire
from sglang_bridge.refusals import Refusals
from sglang_bridge.server.auth import App, Receive, Scope, Send
from sglang_bridge.server.compat import startup

logger = logging.getLogger(__name__)

REFUSED = "this server is still starting; ask again once it has sampled its own first token"
_BODY = f'{{"error":{{"message":"{REFUSED}"}}}}'.encode()
_HEADERS = [(b"content-type", b"application/json")]


class StartGuard:
    """Answers wire.STARTING to control requests while the server starts, unread.

    starts: whether it does. is_control: whether a request is one. refusals: counts them.
    """

    def __init__(
        self,
        app: App,
        starts: Callable[[], bool],
        is_control: Callable[[Scope], bool],
        refusals: Refusals,
    ) -> None:
        self._app, self._starts, self._is_control = app, starts, is_control
        self.refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or not self._starts() or not self._is_control(scope):
            await self._app(scope, receive, send)
            return
        self.refusals.add("a control request")
        await send({"type": "http.response.start", "status": wire.STARTING, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _BODY})


def guard_start() -> None:
    """Guard this process's server; call before SGLang's run_server()."""
    startup.add_guard(
        StartGuard,
        starts=startup.is_starting,
        is_control=startup.is_control,
        refusals=Refusals(logger, "while this server starts"),
    )
