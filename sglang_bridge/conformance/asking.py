"""Asks a server for scores, and turns them into float64 rows.

Axes: T scored tokens, V the ids of the vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from sglang_bridge import wire
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BadReply
from sglang_bridge.http import HttpConnection
from sglang_bridge.protocol import ScoreReply, ScoreRequest, Selection

DoubleArray = npt.NDArray[np.float64]
Runs = Sequence[tuple[int, int]]
LENGTH = 24
"""Ids of the sequences that are scored."""
LIMIT_NATS = {"float32": 1e-4, "float16": 0.05}
OTHER_LIMIT_NATS = 0.3
"""Largest difference of two log-probs that should be equal, where products round as bfloat16."""


class ScoreOptions(TypedDict, total=False):
    """Names the fields of ScoreRequest that a check may choose."""

    temperature: float
    num_atoms: int
    num_draws: int
    seed: int


class Asked:
    """Scores sequences of one server.

    key: the server's API key, if it has one. dtype: of its weights, by its own words.
    """

    def __init__(self, client: ServerClient, http: HttpConnection, key: str | None) -> None:
        self.client, self.http, self.key = client, http, key
        self.vocab_size, self.dtype = 0, ""
        self._names = itertools.count()

    async def introduce(self) -> None:
        """Asks what the server is. Raises BridgeError."""
        told = (await self.client.ask_ranks(wire.MODEL_ACTION))[0]
        size = told.get("vocab_size", "")
        if not size.isdecimal() or int(size) < 2:
            raise BadReply(f"{self.client.url}: vocab_size is {size!r}")
        self.vocab_size, self.dtype = int(size), told.get("dtype", "")

    @property
    def limit_nats(self) -> float:
        """Returns how far two log-probs that should be equal may differ."""
        return LIMIT_NATS.get(self.dtype.removeprefix("torch."), OTHER_LIMIT_NATS)

    def sequence(self, seed: int, length: int = LENGTH) -> list[int]:
        """Returns ids drawn uniformly from the vocabulary, the same for a seed."""
        return np.random.default_rng(seed).integers(0, self.vocab_size, length).tolist()

    async def scores(
        self,
        ids: Sequence[int],
        runs: Runs,
        rows: Sequence[Sequence[int]],
        **options: Unpack[ScoreOptions],
    ) -> ScoreReply:
        """Scores a row of ids for each sampled token. options: of ScoreRequest."""
        request = ScoreRequest(
            rid=f"conformance-{next(self._names)}",
            input_ids=list(ids),
            runs=tuple(runs),
            offsets_T1=np.concatenate([[0], np.cumsum([len(row) for row in rows])]),
            ids_N=np.array([each for row in rows for each in row], dtype=np.int32),
            exact=True,
            **options,
        )
        return await self.client.score(request)

    async def path(self, ids: Sequence[int], **options: Unpack[ScoreOptions]) -> DoubleArray:
        """Returns [T] log-probs of every id but the first."""
        reply = await self.scores(ids, [(1, len(ids))], [[each] for each in ids[1:]], **options)
        return reply.logp_N.astype(np.float64)

    async def whole(self, ids: Sequence[int], **options: Unpack[ScoreOptions]) -> DoubleArray:
        """Returns [V] log-probs of all that may follow all but the last id."""
        every = range(self.vocab_size)
        reply = await self.scores(ids, [(len(ids) - 1, len(ids))], [every], **options)
        return reply.logp_N.astype(np.float64)

    async def selected(self, ids: Sequence[int], **options: Unpack[ScoreOptions]) -> Selection:
        """Returns what the server selects in the place of the last id."""
        reply = await self.scores(ids, [(len(ids) - 1, len(ids))], [[]], **options)
        assert reply.selection is not None
        return reply.selection


def farthest(first: DoubleArray, second: DoubleArray) -> float:
    """Returns the largest difference, in nats; inf where shapes differ or one is not finite."""
    if first.shape != second.shape:
        return math.inf
    far = float(np.abs(first - second).max(initial=0.0))
    return far if math.isfinite(far) else math.inf


def log_sum_exp(logp_V: DoubleArray) -> float:
    """Returns log sum exp."""
    highest = float(logp_V.max())
    return highest + math.log(float(np.exp(logp_V - highest).sum()))
