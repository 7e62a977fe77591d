"""Scores of ragged per-position ids from the logits SGLang computes: no second LM head.

Response row t is scored at absolute position P - 1 + t. However a prompt is split (chunked prefill,
a cached prefix), each forward pass scores the rows of the positions whose logits it computes, and
each row once.

Axes: T response rows of a request, N its flattened ids; L logit rows of one forward pass, K ids
scored in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_bridge import wire
from sglang_bridge.server import compat

RECORD = "_bridge_scores"


class ScoreRecord:
    """A request's ids and the scores so far.

    start: absolute position of row 0; unscored entries are NaN.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.start = int(params[wire.SCORE_START])
        self.offsets_T1 = wire.unpack(params[wire.SCORE_OFFSETS], "<i4").astype(np.int64)
        self.ids_N = wire.unpack(params[wire.SCORE_IDS], "<i4")
        self.logp_N = np.full(len(self.ids_N), np.nan, dtype=np.float32)

    @property
    def stop(self) -> int:
        """Absolute position after the last row."""
        return self.start + len(self.offsets_T1) - 1

    def payload(self) -> dict[str, Any]:
        """What the client parses."""
        return {"logp_N": wire.pack(self.logp_N)}


def wants_scores(req: Any) -> bool:
    """Whether a request carries ids to score."""
    return wire.SCORE_IDS in compat.custom_params(req)


def check_score_params(params: Mapping[str, Any], num_input: int, vocab_size: int) -> None:
    """Raises ValueError for ids that would read outside the logits (on CUDA: a dead server)."""
    record = ScoreRecord(params)
    offsets_T1, ids_N = record.offsets_T1, record.ids_N
    if len(offsets_T1) < 2 or offsets_T1[0] != 0 or offsets_T1[-1] != len(ids_N):
        raise ValueError(f"score offsets must run from 0 to N={len(ids_N)} over at least one row")
    if (np.diff(offsets_T1) < 0).any():
        raise ValueError("score offsets must not fall")
    if len(ids_N) and (ids_N.min() < 0 or ids_N.max() >= vocab_size):
        raise ValueError(f"ids to score must be in 0..{vocab_size - 1}")
    if record.start < 0 or record.stop > num_input:
        raise ValueError(
            f"rows {record.start}..{record.stop} to score do not lie in the input of {num_input}"
        )


@dataclass(frozen=True, slots=True)
class HostScores:
    """One forward pass's scores on the host (SGLang's HostAuxiliaryOutput)."""

    parts: tuple[tuple[ScoreRecord, slice, slice], ...]
    logp_K: torch.Tensor

    def consume(self, batch: Any, commits: list[Any]) -> None:
        """Copies each request's part into its record."""
        logp_K = self.logp_K.numpy()
        for record, into, part in self.parts:
            record.logp_N[into] = logp_K[part]


class ScorePlan:
    """Which ids of which logit rows one forward pass scores, and their scores on the device.

    SGLang computes the logits in chunks of rows; `take` sees each chunk once, in order.
    """

    def __init__(self, batch: Any) -> None:
        parts: list[tuple[ScoreRecord, slice, slice]] = []
        ids: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        num_rows = num_ids = 0
        for req, position, count in compat.logit_rows(batch):
            first_row, num_rows = num_rows, num_rows + count
            if not wants_scores(req):
                continue
            params = compat.custom_params(req)
            record = compat.record_of(req, RECORD, lambda p=params: ScoreRecord(p))
            low, high = max(position, record.start), min(position + count, record.stop)
            if low >= high:
                continue
            edges = record.offsets_T1[low - record.start : high - record.start + 1]
            into = slice(int(edges[0]), int(edges[-1]))
            row_T = np.arange(low, high) - position + first_row
            ids.append(record.ids_N[into])
            rows.append(np.repeat(row_T, np.diff(edges)))
            part = slice(num_ids, num_ids + into.stop - into.start)
            parts.append((record, into, part))
            num_ids = part.stop
        self.parts = tuple(parts)
        self.num_rows = num_rows
        self._ids_K = np.concatenate(ids) if ids else np.empty(0, np.int32)
        self._rows_K = np.concatenate(rows) if rows else np.empty(0, np.int64)
        self._next_row = 0

    def begin(self, num_rows: int, device: torch.device) -> None:
        """Moves the plan to the device.

        Raises RuntimeError when SGLang computes other rows than planned.
        """
        if num_rows != self.num_rows:
            raise RuntimeError(f"planned {self.num_rows} logit rows, SGLang computes {num_rows}")
        index_2K = torch.from_numpy(np.stack([self._rows_K, self._ids_K.astype(np.int64)]))
        if device.type == "cuda":
            index_2K = index_2K.pin_memory()
        self._index_2K = index_2K.to(device, non_blocking=True)
        # Before SGLang's chunk loop, which allocates from a pool that a graph replay overwrites.
        self.logp_K = torch.full((len(self._ids_K),), torch.nan, device=device)
        self._next_row = 0

    def take(self, logits_LV: torch.Tensor) -> None:
        """Scores the next chunk of rows: float32 log softmax at temperature 1."""
        first, last = self._next_row, self._next_row + logits_LV.shape[0]
        self._next_row = last
        low, high = np.searchsorted(self._rows_K, [first, last])
        if low == high:
            return
        rows, ids = self._index_2K[0, low:high] - first, self._index_2K[1, low:high]
        top_L, log_sum_L = compat.row_log_normaliser(logits_LV)
        logits_K = logits_LV[rows, ids].float()
        self.logp_K[low:high] = (logits_K - top_L[rows]) - log_sum_L[rows]

    def tap(self, get_logits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`get_logits` that also shows its result to `take`."""

        def tapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits_LV = get_logits(*args, **kwargs)
            self.take(logits_LV)
            return logits_LV

        return tapped

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> HostScores:
        """Starts the asynchronous copy; `copy` is SGLang's."""
        return HostScores(self.parts, copy(self.logp_K))
