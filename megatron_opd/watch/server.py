"""Answers the page's requests; reading is one thread's, so that answers never see half a step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from megatron_opd.watch.access import Access, guard
from megatron_opd.watch.query import (
    BadQuery,
    columns_query,
    lanes_query,
    refuse_unknown,
    rollouts_query,
    whole,
)
from megatron_opd.watch.watched import Watched
from sglang_bridge.doors import tell_door

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
CHARTS = Path(__file__).parents[1] / "report" / "static" / "uplot"
CHART_FILES = ("uPlot.iife.min.js", "uPlot.min.css")
"""What `opd report` draws with too."""
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
READ_EVERY_S = 0.5

ResultT = TypeVar("ResultT")


class WatchServer:
    """Serves one run.

    Args:
        watched: what is read; used by one thread.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="watch")
        self._behind = True
        self._problem: str | None = None

    def app(self, access: Access, port: int) -> web.Application:
        """Make the application; `port` names its cookie."""
        app = web.Application(middlewares=[tell_door, guard(access, port)])
        app.cleanup_ctx.append(self._reading)
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/api/state", self._state)
        app.router.add_get("/api/curves", self._curves)
        app.router.add_get("/api/evaluations", self._evaluations)
        app.router.add_get("/api/lanes", self._lanes)
        app.router.add_get("/api/rollouts", self._rollouts)
        app.router.add_get("/api/rollouts/{number}", self._rollout)
        return app

    async def _reading(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._read_on(), name="read")
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self._reader.shutdown()

    async def _read_on(self) -> None:
        while True:
            try:
                self._behind = await self._ask(self._watched.read)
                self._problem = None
            except OSError as error:  # a file system that comes back is read on
                if self._problem != str(error):
                    logger.warning("cannot read the run: %s", error)
                self._problem = str(error)
            await asyncio.sleep(0 if self._behind else READ_EVERY_S)

    async def _ask(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._reader, call, *arguments)

    async def _index(self, request: web.Request) -> web.Response:
        return _file(STATIC / "index.html")

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name in CHART_FILES:
            return _file(CHARTS / name)
        # a name is one of a listing: nothing outside can be named
        if name in {entry.name for entry in STATIC.iterdir()}:
            return _file(STATIC / name)
        raise web.HTTPNotFound

    async def _state(self, request: web.Request) -> web.Response:
        _checked(lambda: refuse_unknown(request.query, ()))
        found = await self._ask(self._watched.state)
        return _json(found | {"reading": self._behind, "problem": self._problem})

    async def _curves(self, request: web.Request) -> web.Response:
        columns = _checked(lambda: columns_query(request.query))
        return _json(await self._ask(self._watched.curves, columns))

    async def _evaluations(self, request: web.Request) -> web.Response:
        _checked(lambda: refuse_unknown(request.query, ()))
        return _json(await self._ask(lambda: list(self._watched.evaluations.rows)))

    async def _lanes(self, request: web.Request) -> web.Response:
        from_s, to_s, bins = _checked(lambda: lanes_query(request.query))
        return _json(await self._ask(self._watched.lanes.between, from_s, to_s, bins))

    async def _rollouts(self, request: web.Request) -> web.Response:
        filters, page = _checked(lambda: rollouts_query(request.query))
        return _json(await self._ask(self._watched.rollouts.find, filters, page))

    async def _rollout(self, request: web.Request) -> web.Response:
        given = {"number": request.match_info["number"]}
        number = _checked(lambda: whole(given, "number", 0, 10**12))
        try:
            content = await self._ask(self._watched.rollouts.row, number)
        except (LookupError, OSError, msgspec.DecodeError) as error:
            return web.Response(status=404, text=f"{error}\n")
        return web.Response(body=content, content_type="application/json", charset="utf-8")


def _checked(parse: Callable[[], ResultT]) -> ResultT:
    """Call `parse`; bad parameters become status 400 with one line."""
    try:
        return parse()
    except BadQuery as error:
        raise web.HTTPBadRequest(reason=ascii(str(error))[1:-1]) from None


def _json(value: Any) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), content_type="application/json", charset="utf-8"
    )


def _file(path: Path) -> web.Response:
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")
