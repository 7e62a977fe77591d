"""Answers for thousands of engines, each a path of its own, how far they are with their requests.

python -m benchmarks.many_engines.engines

Prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

from sglang_bridge import wire

PROGRESS = {wire.RUNNING: "{}", wire.WAITING: "[]"}
ANSWER = {"ranks": [{"checksums": PROGRESS, "parallelism_info": [{"tp_rank": 0}]}]}


async def serve() -> None:
    """Serve until standard input ends."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(ANSWER)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
