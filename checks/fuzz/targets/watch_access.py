"""Requests to the page of `opd watch` -> who gets an answer."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from checks.fuzz.engine import Target
from checks.fuzz.mutations import TEXTS
from checks.fuzz.quiet import quiet
from megatron_opd.watch.access import Access, cookie_name, guard

TOKEN, PORT = "t0ken-of-this-page_0123456789-ABC", 8650
NAMES = frozenset({"localhost", "box"})
HOSTS = ("127.0.0.1:8650", "box:8650", "[::1]:8650", "10.0.0.1", "evil.example", "box.evil", "")
PATHS = ("/", "/api/state", "/static/main.js", "/nothing")
PLAIN = [text for text in TEXTS if text.isascii() and text.isprintable()]
Given = tuple[str, str, str | None]
"""Path with query, Host, Cookie."""


class Forbidden(ValueError):
    """The page answered 403."""


def call(given: Given) -> int:
    """Ask the guard. Returns the status of what it answered."""
    path, host, cookie = given
    headers = CIMultiDict({"Host": host} | ({} if cookie is None else {"Cookie": cookie}))

    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="the run")

    async def ask() -> web.StreamResponse:
        request: Any = make_mocked_request("GET", path, headers=headers)
        return await guard(Access(TOKEN, NAMES), PORT)(request, page)

    with quiet("megatron_opd.watch.access"):
        answer = asyncio.run(ask())
    if answer.status == 403:
        raise Forbidden("no token")
    return answer.status


def oracle(given: Given, status: int) -> str | None:
    """The token is in the cookie, or in the address once."""
    path, host, cookie = given
    if host in ("evil.example", "box.evil", ""):
        return "a name that is not this machine's"
    if status == 303:
        return None if TOKEN in path else "let in without the token"
    return None if cookie is not None and TOKEN in cookie else "answered without the token"


def make(rng: Random) -> Given:
    """A token that is right, nearly right, or none; in the cookie, the address, or both."""
    return (
        rng.choice(PATHS) + (f"?token={_token(rng)}" if rng.random() < 0.3 else ""),
        rng.choice(HOSTS),
        f"{cookie_name(PORT)}={_token(rng)}" if rng.random() < 0.8 else None,
    )


def _token(rng: Random) -> str:
    letters = list(TOKEN)
    if rng.random() < 0.7:
        at = rng.randrange(len(letters))
        letters[at : at + rng.randrange(3)] = rng.choice(("", rng.choice(PLAIN), "x"))
    return "".join(letters)


TARGET = Target("watch_access", make, call, (Forbidden,), oracle)
