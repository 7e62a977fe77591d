"""What is measured: responses of a length, with so many cached ids a token, with routing or not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_bridge import wire

DRAWS = 64
PROMPT = 512
VOCAB = 151_936
# A model of 30 billion parameters: layers with experts, experts a token, experts of a layer.
LAYERS, TOPK, EXPERTS = 48, 8, 128
TOKENS, IDS = (4096, 16384), (14, 29)


@dataclass(frozen=True, slots=True)
class Case:
    """Describes the samples of one measurement: `ids` distinct ids at each of `tokens` tokens."""

    tokens: int
    ids: int
    routed: bool = False

    @property
    def name(self) -> str:
        """Returns what the case is called."""
        return f"{self.tokens} tokens, {self.ids} ids{', routed' * self.routed}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds what a server recorded of one response, and what a teacher says of its ids.

    columns: by name, the arrays of wire.DRAW_FIELDS in their types.
    """

    output_ids_T: np.ndarray
    columns: dict[str, np.ndarray]
    teacher_logp_N: np.ndarray
    experts_XLk: np.ndarray | None


def prompt_ids(case: Case) -> np.ndarray:
    """Return the prompt of every sample."""
    return np.random.default_rng(1).integers(0, VOCAB, PROMPT).astype(np.int32)


def make_rows(case: Case) -> Rows:
    """Draw the rows of a response: 64 draws at every token hit `ids` distinct ids."""
    rng = np.random.default_rng(0)
    shape = (case.tokens, case.ids)
    apart_K = np.arange(case.ids) * (VOCAB // case.ids)
    ids_TK = np.sort((rng.integers(0, VOCAB, (case.tokens, 1)) + apart_K) % VOCAB, axis=1)
    hits_TK = np.ones(shape, np.int64)
    hits_TK[np.arange(case.tokens), rng.integers(0, case.ids, case.tokens)] += DRAWS - case.ids
    noise = rng.normal(0, 0.1, (2, *shape))
    logp_TK = np.minimum(np.log(hits_TK / DRAWS * 0.9) + noise[0] * 0.1, -1e-3)
    path_T = rng.integers(0, case.ids, case.tokens)
    columns = {
        "length_T": np.full(case.tokens, case.ids),
        "path_T": path_T,
        "ids_N": ids_TK.reshape(-1),
        "weight_N": (hits_TK / DRAWS).reshape(-1),
        "sampler_logp_N": logp_TK.reshape(-1),
    }
    experts = None
    if case.routed:
        inputs = PROMPT + case.tokens - 1
        apart_k = np.arange(TOPK) * (EXPERTS // TOPK)
        first = rng.integers(0, EXPERTS // TOPK, (inputs, LAYERS, 1))
        experts = (first + apart_k).astype(np.uint8)
    return Rows(
        ids_TK[np.arange(case.tokens), path_T].astype(np.int32),
        {name: columns[name].astype(dtype) for name, dtype in wire.DRAW_FIELDS.items()},
        np.minimum(logp_TK + noise[1], -1e-3).reshape(-1).astype(np.float32),
        experts,
    )
