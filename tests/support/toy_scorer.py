"""A language model of a few numbers in float64, behind the routes that a real server has.

The subclasses are wrong, each in one way.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from sglang_bridge import wire
from sglang_bridge.protocol import row_positions
from sglang_bridge.server import front
from sglang_bridge.server.entry import offer_standins
from sglang_bridge.server.scoring import ScoreRecord, runs_of
from sglang_bridge.server.validate import check_score_params

offer_standins()
from sglang.srt.entrypoints import http_server  # noqa: E402  (it needs torchvision)

VOCAB_SIZE, WIDTH, MEMORY = 40, 16, 0.6


class ToyScorer:
    """Answers requests for scores as SGLang's tokenizer manager does."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.embedding = rng.normal(size=(VOCAB_SIZE, WIDTH))
        self.head = rng.normal(size=(WIDTH, VOCAB_SIZE))
        self.running, self.seen, self.draws = 0, set[tuple[int, ...]](), np.random.default_rng(1)

    def logits(self, ids: list[int]) -> np.ndarray:
        """[V], of what follows these ids."""
        age = np.arange(len(ids))[::-1]
        return np.tanh((MEMORY**age) @ self.embedding[ids]) @ self.head

    def context(self, ids: list[int], position: int) -> list[int]:
        return ids[: position + 1]

    def logp(self, ids: list[int], position: int, temperature: float) -> np.ndarray:
        scaled = self.logits(self.context(ids, position)) / temperature
        return scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()

    def likeliest(self, logp_V: np.ndarray, count: int) -> np.ndarray:
        return np.argsort(-logp_V, kind="stable")[:count]

    def drawn_from(self, logp_V: np.ndarray) -> np.ndarray:
        return np.exp(logp_V)

    def check(self, params: dict[str, Any], ids: list[int]) -> None:
        if max(ids) >= VOCAB_SIZE:
            raise ValueError("input_ids must be of the vocabulary")
        check_score_params(params, len(ids), VOCAB_SIZE)

    async def generate_request(self, asked: Any, request: Any):
        params = asked.sampling_params["custom_params"]
        self.check(params, asked.input_ids)
        self.running += 1
        await asyncio.sleep(0.002)
        record = ScoreRecord(params)
        self.fill(record, asked.input_ids, row_positions(runs_of(params)))
        self.running -= 1
        self.seen.add(tuple(asked.input_ids))
        payload = [{wire.SCORES: record.payload()}]
        yield {"output_ids": [], "meta_info": {"id": asked.rid, wire.PAYLOAD: payload}}

    def fill(self, record: ScoreRecord, ids: list[int], position_T: np.ndarray) -> None:
        for row, position in enumerate(position_T.tolist()):
            logp_V = self.logp(ids, position, record.temperature)
            part = slice(record.offsets_T1[row], record.offsets_T1[row + 1])
            record.logp_N[part] = logp_V[record.ids_N[part]]
            if record.selects:
                record.append_selected(row, self.select(record, logp_V))

    def select(self, record: ScoreRecord, logp_V: np.ndarray) -> dict[str, np.ndarray]:
        weight_V, tail_V = np.zeros(VOCAB_SIZE), self.drawn_from(logp_V)
        atoms = self.likeliest(logp_V, record.num_atoms)
        weight_V[atoms], tail_V[atoms] = np.exp(logp_V[atoms]), 0
        if record.num_draws:
            hits_V = self.draws.multinomial(record.num_draws, tail_V / tail_V.sum())
            weight_V += hits_V / record.num_draws * (1 - weight_V.sum())
        (ids,) = np.nonzero(weight_V)
        found = {"length_T": [len(ids)], "ids_N": ids}
        found |= {"weight_N": weight_V[ids], "logp_N": logp_V[ids]}
        return {name: np.array(found[name], dtype) for name, dtype in wire.ROW_FIELDS.items()}


class Late(ToyScorer):
    def context(self, ids: list[int], position: int) -> list[int]:
        return ids[: position + 2]


class Early(ToyScorer):
    def context(self, ids: list[int], position: int) -> list[int]:
        return ids[: max(1, position)]


class Unnormalised(ToyScorer):
    def logp(self, ids: list[int], position: int, temperature: float) -> np.ndarray:
        return super().logp(ids, position, temperature) - 0.001


class Cold(ToyScorer):
    def logp(self, ids: list[int], position: int, temperature: float) -> np.ndarray:
        return super().logp(ids, position, 1.0)


class Farsighted(ToyScorer):
    def logits(self, ids: list[int]) -> np.ndarray:
        return super().logits(ids) + 0.01 * self.head[self.last % WIDTH]

    def logp(self, ids: list[int], position: int, temperature: float) -> np.ndarray:
        self.last = len(ids)
        return super().logp(ids, position, temperature)


class Sociable(ToyScorer):
    def logits(self, ids: list[int]) -> np.ndarray:
        return super().logits(ids) * (1 + 0.001 * self.running)


class Forgetful(ToyScorer):
    def logp(self, ids: list[int], position: int, temperature: float) -> np.ndarray:
        scale = 1.001 if tuple(ids) in self.seen else 1.0
        return super().logp(ids, position, temperature * scale)


class FirstAtoms(ToyScorer):
    def likeliest(self, logp_V: np.ndarray, count: int) -> np.ndarray:
        return np.arange(count)


class WarmDraws(ToyScorer):
    def drawn_from(self, logp_V: np.ndarray) -> np.ndarray:
        return np.exp(logp_V / 1.3)


class Credulous(ToyScorer):
    def check(self, params: dict[str, Any], ids: list[int]) -> None:
        ids[:] = [each % VOCAB_SIZE for each in ids]
        super().check(params, ids)


@contextmanager
def served(scorer: ToyScorer) -> Iterator[str]:
    """Its url, while it is served on loopback by the routes of server/front.py."""

    async def facts(request: Any) -> JSONResponse:
        told = {"vocab_size": str(VOCAB_SIZE), "dtype": "torch.float32"}
        return JSONResponse({"ranks": [{"checksums": told, "parallelism_info": []}]})

    with pytest.MonkeyPatch.context() as patch:
        app = Starlette(routes=[Route("/weights_checker", facts, methods=["POST"])])
        patch.setattr(http_server, "app", app)
        state = SimpleNamespace(tokenizer_manager=scorer)
        patch.setattr(http_server, "get_global_state", lambda: state)
        front.add_work_routes()
        # its own logging would close what other handlers write to
        config = uvicorn.Config(app, port=0, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
