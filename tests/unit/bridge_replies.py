"""Well-formed replies of a server, for tests to damage; and a fake server to send them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

from sglang_bridge import wire
from sglang_bridge.protocol import RolloutRequest, ScoreRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST = RolloutRequest(rid="r", input_ids=[1, 2, 3], max_new_tokens=8, num_draws=4)
SCORE_REQUEST = ScoreRequest(
    rid="s",
    input_ids=[1, 2, 3, 4, 5],
    num_prompt_tokens=2,
    offsets_T1=np.array([0, 2, 2, 3]),
    ids_N=np.array([7, 8, 9], np.int32),
)


def draws_payload() -> dict[str, Any]:
    """Tokens 5, 9, 5 with rows {5, 7}, {9}, {2, 5, 8} of 4 draws each; token 2 has version 4."""
    arrays = {
        "length_T": np.array([2, 1, 3], np.uint8),
        "path_T": np.array([0, 0, 1], np.uint8),
        "ids_N": np.array([5, 7, 9, 2, 5, 8], np.int32),
        "count_N": np.array([1, 3, 4, 2, 0, 2], np.uint8),
        "logp_N": np.array([-1, -0.5, 0, -1, -2, -3], np.float32),
    }
    packed = {name: wire.pack(array) for name, array in arrays.items()}
    return {**packed, "num_draws": 4, "versions": [["3", 0], ["4", 2]]}


def rollout_reply(payload: dict[str, Any] | None = None) -> dict[str, Any]:
    """What /generate answers to REQUEST."""
    draws = draws_payload() if payload is None else payload
    return {
        "text": "",
        "output_ids": [5, 9, 5],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": 5},
            "weight_versions": [{"version": "3", "start": 0, "end": 3}],
            wire.PAYLOAD: [{wire.DRAWS: draws}],
        },
    }


def score_reply(scores: list[float]) -> dict[str, Any]:
    """What /generate answers to SCORE_REQUEST."""
    packed = wire.pack(np.array(scores, np.float32))
    payload = [{wire.SCORES: {"logp_N": packed}}]
    return {"output_ids": [], "meta_info": {"id": "x", wire.PAYLOAD: payload}}


class FakeServer:
    """HTTP on a free loopback port; `routes` maps a path to a handler, `seen` lists the paths."""

    def __init__(self, routes: dict[str, Handler]) -> None:
        self._routes = routes
        self.seen: list[str] = []

    async def __aenter__(self) -> "FakeServer":
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.path)
        return await self._routes[request.path](request)


def answering(body: Any, status: int = 200) -> Handler:
    """A handler with one answer."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handle


def breaking(times: int, then: Handler) -> Handler:
    """A handler that drops the connection `times` times before it answers."""
    left = times

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal left
        await request.read()
        if left > 0:
            left -= 1
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(0)
        return await then(request)

    return handle
