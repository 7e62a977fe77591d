"""Well-formed replies of a server, for tests to damage; and a fake server to send them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from msgspec.structs import replace

from checks.fuzz.targets.bridge_replies import SCORES
from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.protocol import RolloutRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

URL = "http://host:1"
REQUEST = RolloutRequest(rid="r", input_ids=[1, 2, 3], max_new_tokens=8, num_draws=4)
SCORE_REQUEST = SCORES
# Two atoms and two draws a row besides the given ids; temperature 2.
SELECT_REQUEST = replace(SCORE_REQUEST, temperature=2.0, num_atoms=2, num_draws=2)


def packed(arrays: dict[str, list]) -> dict[str, bytes]:
    """The arrays of a row table as they travel, log-probs exactly."""
    kinds = wire.ROW_FIELDS | wire.DRAW_FIELDS
    return {name: pack(np.array(v, kinds[name])) for name, v in arrays.items()}


def draws_payload() -> dict[str, Any]:
    """Tokens 5, 9, 5 with rows {5, 7}, {9}, {2, 5, 8} of 4 draws each; token 2 has version 4."""
    arrays = {
        "length_T": [2, 1, 3],
        "path_T": [0, 0, 1],
        "ids_N": [5, 7, 9, 2, 5, 8],
        "weight_N": [0.25, 0.75, 1, 0.5, 0, 0.5],
        "sampler_logp_N": [-1, -0.5, 0, -1, -2, -3],
    }
    return {
        **packed(arrays),
        "num_atoms": 0,
        "num_draws": 4,
        "versions": [["3", 0], ["4", 2]],
    }


def selection_payload() -> dict[str, Any]:
    """Rows {2, 7, 9}, {4}, {1, 9, 30} for SELECT_REQUEST."""
    arrays = {
        "length_T": [3, 1, 3],
        "ids_N": [2, 7, 9, 4, 1, 9, 30],
        "weight_N": [0.5, 0.25, 0.25, 1, 0.125, 0.625, 0.25],
        "logp_N": [-0.75, -1, -2, 0, -4, -0.25, -3],
    }
    return {**packed(arrays), "num_atoms": 2, "num_draws": 2}


def rollout_reply(payload: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a server answers to REQUEST."""
    draws = draws_payload() if payload is None else payload
    return {
        "output_ids": pack(np.array([5, 9, 5])),
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": 5},
            "weight_versions": [{"version": "3", "start": 0, "end": 3}],
            "cached_tokens": 1,
            wire.PAYLOAD: [{wire.DRAWS: draws}],
        },
    }


def score_reply(scores: list[float], selection: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a server answers to SCORE_REQUEST, or to SELECT_REQUEST."""
    payload: dict[str, Any] = {"logp_N": pack(np.array(scores, np.float32))}
    if selection is not None:
        payload[wire.SELECTION] = selection
    return {
        "output_ids": pack(np.array([], np.int32)),
        "meta_info": {"id": "x", wire.PAYLOAD: [{wire.SCORES: payload}]},
    }


class FakeServer:
    """HTTP on a free loopback port; `routes` maps a path to a handler, `seen` lists the paths."""

    def __init__(self, routes: dict[str, Handler]) -> None:
        self._routes = routes
        self.seen: list[str] = []

    async def __aenter__(self) -> "FakeServer":
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)  # for handlers that wait
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
    """A handler with one answer, to work as msgpack, to all else as JSON."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == wire.WORK_ROUTE and status == 200:
            return worked(body)
        return web.json_response(body, status=status)

    return handle


def worked(reply: Any) -> web.Response:
    """The answer to a request for work."""
    return web.Response(body=msgspec.msgpack.encode(reply), content_type=wire.WORK_TYPE)


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
