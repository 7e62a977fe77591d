"""A proxy that makes a scorer answer one position late: the planted fault of conformance."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from sglang_bridge import wire
from sglang_bridge.arrays import pack, unpack


def one_late(body: bytes) -> bytes:
    """A request whose every row is scored one position later, in a sequence with an id more."""
    try:
        tree = msgspec.msgpack.decode(body)
    except msgspec.DecodeError:
        return body  # bad on purpose
    params = tree["sampling_params"]["custom_params"]
    params[wire.SCORE_RUNS] = pack(unpack(params[wire.SCORE_RUNS], "<i4") + 1)
    tree["input_ids"] = pack(np.append(unpack(tree["input_ids"], "<i4"), 0))
    tree["logprob_start_len"] += 1
    return msgspec.msgpack.encode(tree)


@asynccontextmanager
async def late_proxy(url: str) -> AsyncIterator[str]:
    """Its url; everything but requests for work is passed on as it is."""

    async def pass_on(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path == wire.WORK_ROUTE:
            body = one_late(body)
        headers = {
            n: v for n, v in request.headers.items() if n in ("Authorization", "Content-Type")
        }
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(request.method, f"{url}{request.path}", data=body) as reply,
        ):
            return web.Response(
                status=reply.status, body=await reply.read(), content_type=reply.content_type
            )

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
