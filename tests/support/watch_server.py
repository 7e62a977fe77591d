"""The watch server of a run in this process, and what asks it for a path."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import ClientResponse, ClientSession, CookieJar, test_utils

from megatron_opd.report.run_files import RunFiles
from megatron_opd.watch.access import Access, cookie_name
from megatron_opd.watch.server import WatchServer
from megatron_opd.watch.watched import Watched

TOKEN, PORT = "right-token", 8650
Asked = Callable[..., Awaitable[ClientResponse]]


def served(run_dir: Path, scenario: Callable[[Asked], Awaitable[None]]) -> None:
    """Call `scenario` with what asks the server; the server knows the name `box`.

    The reply's body is read. cookie: the token to show, None for none. host: the Host header.
    """

    async def main() -> None:
        app = WatchServer(Watched(RunFiles(run_dir))).app(Access(TOKEN, frozenset({"box"})), PORT)
        async with (
            test_utils.TestServer(app) as server,
            ClientSession(cookie_jar=CookieJar()) as session,
        ):

            async def ask(
                path: str,
                method: str = "GET",
                cookie: str | None = TOKEN,
                host: str | None = None,
                **parameters: str | int,
            ) -> ClientResponse:
                headers = {"Cookie": f"{cookie_name(PORT)}={cookie}"} if cookie else {}
                headers |= {"Host": host} if host else {}
                url = f"{str(server.make_url('/'))[:-1]}{path}"
                answer = await session.request(
                    method,
                    url,
                    headers=headers,
                    allow_redirects=False,
                    params=parameters or None,
                )
                await answer.read()
                return answer

            await scenario(ask)

    asyncio.run(main())
