"""A server of somebody else over HTTP: a bigram model, and the faults that a test plants."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from aiohttp import web

from harness import foreign_replies
from sglang_bridge.protocol import ScoreRequest

Form = Literal["sglang", "vllm", "sglang_openai", "chat"]
IDS = [3, 5, 7, 2, 9, 4, 11, 6]
RUNS = ((2, 4), (6, 8))
MODEL = "toy"


def score_request(atoms: int = 0, ids: list[int] | None = None, **keys: Any) -> ScoreRequest:
    """For the sampled ids of IDS, and the likeliest ones."""
    ids = IDS if ids is None else ids
    path = [ids[at] for start, stop in RUNS for at in range(start, stop)]
    given: dict[str, Any] = {
        "rid": "r",
        "input_ids": np.array(ids, np.int32),
        "runs": RUNS,
        "offsets_T1": np.arange(len(path) + 1),
        "ids_N": np.array(path, np.int32),
        "num_atoms": atoms,
    }
    return ScoreRequest(**(given | keys))


def busy(status: int, **headers: str) -> web.Response:
    names = {key.replace("_", "-"): value for key, value in headers.items()}
    return web.json_response({"error": {"message": "slow down"}}, status=status, headers=names)


async def silent() -> web.Response:
    """No answer within any test."""
    await asyncio.sleep(3600)
    raise AssertionError("unreachable")


@dataclass
class ForeignServer:
    """first: what is answered before the first real reply, in turn. damage: of every reply.

    asked: the requests for work that came; at_s: when, by the loop's clock.
    """

    form: Form
    first: list[Callable[[], Any]] = field(default_factory=list)
    damage: Callable[[dict[str, Any]], Any] = lambda reply: None
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    models: tuple[str, ...] = (MODEL,)
    url: str = ""

    async def work(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.add(request.headers.get("Authorization"))
        if self.first:
            answer = self.first.pop(0)()
            return answer if isinstance(answer, web.Response) else await answer
        reply = getattr(foreign_replies, self.form)(self.asked[-1])
        self.damage(reply)
        return web.json_response(reply)

    async def list_models(self, request: web.Request) -> web.Response:
        entries = [{"id": name, "root": "", "max_model_len": 64} for name in self.models]
        return web.json_response({"object": "list", "data": entries})

    @asynccontextmanager
    async def up(self) -> AsyncIterator["ForeignServer"]:
        app = web.Application()
        app.router.add_post("/generate", self.work)
        app.router.add_post("/v1/completions", self.work)
        app.router.add_post("/v1/chat/completions", self.work)
        app.router.add_get("/v1/models", self.list_models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
