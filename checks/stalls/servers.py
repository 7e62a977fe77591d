"""Fake servers in one process of their own: two students, and a teacher that can be told to stall.

    python -m checks.stalls.servers STUDENT_PACE_S

Prints their ports as JSON and serves until its standard input ends. Each works on one request
after another. `POST /behave` with {"behaviour": Behaviour} changes what a server does from then on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

from benchmarks.data_path.cases import make_rows
from benchmarks.data_path.replies import CONTENT_TYPE, rollout_reply, score_reply
from benchmarks.data_path.servers import NAME, STATE, Role, serve
from checks.stalls.cases import PACE_S, SAMPLES, SLOWER, Behaviour
from sglang_bridge import wire


class Server:
    """Answers as a server that has nobody else to serve.

    make: the reply to a request by its name and the version of the weights. pace_s: of a request.
    """

    def __init__(self, make: Callable[[str, str], bytes], pace_s: float) -> None:
        self._make, self._pace_s = make, pace_s
        self._behaviour: Behaviour = "serve"
        self._serves = asyncio.Event()
        self._serves.set()
        self._set_version("0")
        self._turn = asyncio.Lock()
        self._running: str | None = None
        self._waiting: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of any kind."""
        if request.path == "/behave":
            self._behaviour = (await request.json())["behaviour"]
            stalls = self._behaviour in ("silent", "stuck")
            self._serves.clear() if stalls else self._serves.set()
            return web.json_response({})
        if self._behaviour == "silent":
            await self._serves.wait()
        if request.path == wire.WORK_ROUTE:
            return await self._work(await request.read())
        asked = await request.json() if request.method == "POST" else {}
        if request.path == "/update_weight_version":
            self._set_version(asked["new_version"])
        if asked.get("action") == wire.PROGRESS_ACTION:
            return web.json_response(self._progress())
        return web.json_response(self._state.get(request.path, {}))

    async def _work(self, body: bytes) -> web.Response:
        named = NAME.search(body)
        assert named is not None, body[:200]
        rid = named.group().decode()
        self._waiting.append(rid)
        try:
            async with self._turn:
                self._running = rid
                slower = SLOWER if self._behaviour == "slow" else 1
                await asyncio.sleep(self._pace_s * slower)
                await self._serves.wait()
        finally:
            self._waiting.remove(rid)
            self._running = None
        return web.Response(body=self._role.answer(body), content_type=CONTENT_TYPE)

    def _set_version(self, version: str) -> None:
        self._role = Role(lambda rid: self._make(rid, version))
        self._state = STATE | {"/model_info": STATE["/model_info"] | {"weight_version": version}}

    def _progress(self) -> dict[str, Any]:
        running = {} if self._running is None else {self._running: 0}
        waiting = [rid for rid in self._waiting if rid != self._running]
        said = {wire.RUNNING: json.dumps(running), wire.WAITING: json.dumps(waiting)}
        return {"ranks": [{"checksums": said, "parallelism_info": [{"tp_rank": 0}]}]}


def main(student_pace_s: float) -> None:
    """Serve until standard input ends."""
    rows = make_rows(SAMPLES)

    def sampled(rid: str, version: str) -> bytes:
        return rollout_reply(SAMPLES, rows, rid, version)

    servers = (
        Server(sampled, student_pace_s),
        Server(sampled, student_pace_s),
        Server(lambda rid, version: score_reply(SAMPLES, rows, rid), PACE_S),
    )
    asyncio.run(serve(*(server.handle for server in servers)))


if __name__ == "__main__":
    main(float(sys.argv[1]))
