"""Rows of the study: every prefix of one response of the old student, at one staleness.

Transformers' float32 models read the response; log-probs are float64 from the logits on.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from studies.prefixes.enumerate.tails import Columns, Three, old_columns, pair_columns

CHUNK = 16  # prefixes enumerated at once
Tree = dict[str, Any]


@dataclass(frozen=True)
class Walk:
    """A prompt and the response that the old student sampled, end token included."""

    name: str
    prompt: list[int]
    response: list[int]


@torch.no_grad()
def logits_TV(model: Any, walk: Walk) -> torch.Tensor:
    """Return float32 logits [T, V] that predict each token of the response."""
    ids = torch.tensor([walk.prompt + walk.response])
    return model(ids, logits_to_keep=len(walk.response) + 1).logits[0, :-1]


def measure_old(old: torch.Tensor) -> Tree:
    """Return what the old student's logits [T, V] decide."""
    return packed([old_columns(logp(old[rows])) for rows in chunks(old)])


def measure_pair(old: torch.Tensor, now: torch.Tensor, teacher: torch.Tensor) -> Tree:
    """Return what all three models' logits [T, V] decide."""
    return packed(
        [
            pair_columns(Three(logp(old[rows]), logp(now[rows]), logp(teacher[rows])))
            for rows in chunks(old)
        ]
    )


def chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Yield the rows that are enumerated at once."""
    for first in range(0, len(logits), CHUNK):
        yield slice(first, first + CHUNK)


def logp(logits: torch.Tensor) -> torch.Tensor:
    """Return float64 log-probs."""
    return logits.double().log_softmax(-1)


def packed(parts: list[Columns]) -> dict[str, str]:
    """Return each column of all chunks as base64 of float64."""
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return {
        key: base64.b64encode(x.numpy().astype("<f8").tobytes()).decode()
        for key, x in whole.items()
    }


def unpacked(columns: Mapping[str, str], tokens: int) -> dict[str, np.ndarray]:
    """Return what `packed` was given, as arrays [T] or [T, columns]."""
    found = {}
    for key, text in columns.items():
        flat = np.frombuffer(base64.b64decode(text), "<f8")
        found[key] = flat if len(flat) == tokens else flat.reshape(tokens, -1)
    return found
