"""Checks a batch on the learner's rank before it trains on it.

The controller has checked its servers' replies already; this keeps a damaged or forged message from
being read as numbers. Teacher scores may be NaN: the loss becomes NaN then and the run stops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_opd.records.columns import RankBatch, RankInputs
from sglang_bridge.columns import arrays_of

# unknown where the teacher chose the ids; where no teacher is asked
MAY_BE_NAN = ("sampler_logp_N", "teacher_logp_N")


def check_inputs(batch: RankInputs, *, vocab_size: int, num_experts: int) -> None:
    """Raise ValueError naming the column when these cannot be inputs of this model."""
    sequences = len(batch.length_B)
    planned = sorted(index for mini in batch.plan for micro in mini for index in micro)
    if planned != list(range(sequences)):
        raise ValueError(f"plan must name each of {sequences} sequences once, got {len(planned)}")
    if not all(mini and mini[0] for mini in batch.plan):
        raise ValueError("plan must begin each mini-batch with a micro-batch of sequences")
    if batch.update < 0 or batch.version < 0:
        raise ValueError(f"update and version must be >= 0, got {batch.update}, {batch.version}")
    # none exceeds what it is a length in: sums of larger ones could wrap around to the right one
    for name in ("length_B", "response_B"):
        _within(name, getattr(batch, name), 1, len(batch.ids_S))
    _check_positions(batch)
    _within("ids_S", batch.ids_S, 0, vocab_size - 1)
    if batch.experts_XLk is not None:
        _within("experts_XLk", batch.experts_XLk, 0, num_experts - 1)
    if batch.gates_XLk is not None:
        _finite("gates_XLk", batch.gates_XLk.reshape(-1))
        _not_negative("gates_XLk", batch.gates_XLk)
    for name, column in arrays_of(batch, RankInputs).items():
        if column.dtype.kind == "f":
            _finite(name, column)
    for name in ("reward_weight_B", "teacher_weight_B", "imitation_weight_B"):
        _not_negative(name, getattr(batch, name))


def check_batch(batch: RankBatch, *, vocab_size: int, num_experts: int, sampled: bool) -> None:
    """Raise ValueError naming the column when the columns cannot be a batch of this model.

    sampled: the cached ids are the sampler's, so each has its log-prob; where the teacher chose
    them, NaN stands for an unknown log-prob.
    """
    check_inputs(batch, vocab_size=vocab_size, num_experts=num_experts)
    _within("count_T", batch.count_T, 1, len(batch.ids_N))
    _within("ids_N", batch.ids_N, 0, vocab_size - 1)
    _within("version_T", batch.version_T, 0, batch.version)
    ends_T = np.cumsum(batch.count_T)
    outside = (batch.path_T < ends_T - batch.count_T) | (batch.path_T >= ends_T)
    if outside.any():
        raise ValueError(f"column path_T must point into its own row, token {outside.argmax()}")
    differs = batch.ids_N[batch.path_T] != batch.ids_S[_places(batch)]
    if differs.any():
        raise ValueError(f"column path_T must point to the sampled ids, token {differs.argmax()}")
    rises = np.diff(batch.ids_N) > 0
    rises[ends_T[:-1] - 1] = True  # from one row to the next
    if not rises.all():
        raise ValueError(f"column ids_N must rise inside a row, value {rises.argmin() + 1}")
    for name, column in arrays_of(batch, RankBatch).items():
        if column.dtype.kind == "f" and name not in MAY_BE_NAN:
            _finite(name, column)
    if batch.turn_advantage_T is not None:
        _finite("turn_advantage_T", batch.turn_advantage_T)
    _finite("sampler_logp_N", batch.sampler_logp_N if sampled else _path(batch))
    _not_negative("weight_N", batch.weight_N)


def _check_positions(batch: RankInputs) -> None:
    """Raise ValueError unless sampled tokens lie in their own sequences, each once and in order."""
    tokens = int(batch.response_B.sum())
    if int(batch.length_B.sum()) != len(batch.ids_S) or tokens != len(batch.position_T):
        raise ValueError(
            f"length_B and response_B must add up to {len(batch.ids_S)} and "
            f"{len(batch.position_T)}, got {int(batch.length_B.sum())} and {tokens}"
        )
    length_T = np.repeat(batch.length_B, batch.response_B)
    outside = (batch.position_T < 1) | (batch.position_T >= length_T)
    rises = np.diff(_places(batch), prepend=-1) > 0
    if outside.any() or not rises.all():
        wrong = int((outside | ~rises).argmax())
        raise ValueError(
            f"column position_T must rise inside a sequence, from 1 on, token {wrong} does not"
        )


def _places(batch: RankInputs) -> npt.NDArray[np.int64]:
    """Return int64 [T]: where each sampled token lies in `ids_S`."""
    start_B = np.cumsum(batch.length_B) - batch.length_B
    return np.repeat(start_B, batch.response_B) + batch.position_T


def _path(batch: RankBatch) -> npt.NDArray[Any]:
    return batch.sampler_logp_N[batch.path_T]


def _within(name: str, values: npt.NDArray[Any], least: int, most: int) -> None:
    if len(values) and (values.min() < least or values.max() > most):
        raise ValueError(
            f"column {name} must be in {least}..{most}, got {values.min()}..{values.max()}"
        )


def _finite(name: str, values: npt.NDArray[Any]) -> None:
    if not np.isfinite(values).all():
        raise ValueError(
            f"column {name} must be finite, value {np.isfinite(values).argmin()} is not"
        )


def _not_negative(name: str, values: npt.NDArray[Any]) -> None:
    if (values < 0).any():
        raise ValueError(f"column {name} must be >= 0, got {values.min()}")
