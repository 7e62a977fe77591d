"""Requests to a server with an API key, as its ASGI server hands them on -> who is let through."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from checks.fuzz.engine import Target
from checks.fuzz.mutations import BYTES, TEXTS
from checks.fuzz.quiet import quiet
from sglang_bridge.refusals import Refusals
from sglang_bridge.server.auth import OPEN, PROBES, KeyGuard, logger

KEY = "k3y-of-this-server_0123456789"
SHOWN = f"Bearer {KEY}".encode()
PATHS = (*sorted(OPEN), "/generate", "/health_generate", "/healthy", "/server_info", "/flush_cache")
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "get", "")
NAMES = (b"authorization", b"host", b"x-api-key", b"cookie", b"Authorization")
Scope = dict[str, Any]


class Unauthorized(ValueError):
    """The guard answered 401 or closed the websocket."""


def call(scope: Scope) -> str:
    """Ask the guard. Returns the path that was let through."""
    passed: list[str] = []
    answers: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def receive() -> Any:
        raise AssertionError("a stranger's body is read")

    async def send(message: Any) -> None:
        answers.append(message)

    guard = KeyGuard(app, KEY, Refusals(logger, "by this server"))
    with quiet("sglang_bridge.server.auth"):
        asyncio.run(guard(scope, receive, send))
    if passed:
        return passed[0]
    assert guard.refusals.count == 1, "a refusal that is not counted"
    refused = answers[0].get("status") == 401 or answers[0]["type"] == "websocket.close"
    assert refused, answers
    raise Unauthorized("no key")


def oracle(scope: Scope, path: str) -> str | None:
    """Probes pass, and whoever shows the one right key."""
    probe = scope["type"] == "http" and scope["method"] in PROBES and path in OPEN
    shown = [value for name, value in scope["headers"] if name == b"authorization"]
    known = len(shown) == 1 and shown[0][7:] == KEY.encode() and shown[0][:7].lower() == b"bearer "
    return None if probe or known else "let through without the key"


def make(rng: Random) -> Scope:
    """A request with a key that is right, nearly right, or none."""
    key = bytearray(SHOWN)
    if rng.random() < 0.8:
        at = rng.randrange(len(key))
        key[at : at + rng.randrange(3)] = rng.choice((b"", rng.randbytes(1), rng.choice(BYTES)))
    headers = [(rng.choice(NAMES), bytes(key)) for _ in range(rng.choice((1, 1, 1, 2)))]
    headers += [(rng.choice(NAMES), rng.choice(BYTES)) for _ in range(rng.randrange(3))]
    path = rng.choice(PATHS) + (rng.choice(TEXTS) if rng.random() < 0.3 else "")
    kind = "websocket" if rng.random() < 0.1 else "http"
    return {"type": kind, "method": rng.choice(METHODS), "path": path, "headers": headers}


TARGET = Target("server_key", make, call, (Unauthorized,), oracle)
