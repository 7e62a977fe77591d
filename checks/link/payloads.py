"""Bytes like those that sites send: samples, weights; and noise, which nothing compresses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

VOCABULARY = 150_000
TOKENS = 2048
"""Of one response in `samples`."""


def noise(num_bytes: int) -> bytes:
    """Random bytes."""
    return np.random.default_rng(0).bytes(num_bytes)


def weights(num_bytes: int) -> bytes:
    """Normal numbers of a layer's size in bfloat16, as an exported checkpoint holds them."""
    numbers = np.random.default_rng(0).normal(0, 0.02, num_bytes // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def samples(num_bytes: int) -> bytes:
    """Columns of samples: token ids by Zipf's law, log-probs in float32, a mask."""
    chance = np.random.default_rng(0)
    found = b""
    rows = []
    size = 0
    while size < num_bytes:
        ids = np.minimum(chance.zipf(1.2, TOKENS), VOCABULARY).astype(np.int32)
        logp = -chance.exponential(0.7, 2 * TOKENS).astype(np.float32)  # student, teacher
        row = ids.tobytes() + logp.tobytes() + np.ones(TOKENS, np.bool_).tobytes()
        rows.append(row)
        size += len(row)
    found = b"".join(rows)
    return found[:num_bytes]


PAYLOADS: dict[str, Callable[[int], bytes]] = {
    "noise": noise,
    "weights": weights,
    "samples": samples,
}
