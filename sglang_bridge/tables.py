"""Reads row tables of a reply, checks them against the request, and joins the ids given.

Axes: T rows, N flattened ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from sglang_bridge.arrays import LOGP_SLACK, unpack
from sglang_bridge.errors import BadReply
from sglang_bridge.protocol import (
    FloatArray,
    IntArray,
    OffsetArray,
    RolloutRequest,
    ScoreRequest,
    Selection,
)

# Rounding may leave the probabilities of a row's ids this far above 1,
MASS_SLACK = 1e-2
# and float32 weights this far from their sum.
WEIGHT_SLACK = 1e-4
# Relative, of an atom's weight and the exp of its log-prob: softmax and log-softmax of one row of
# float32 logits. Over 152k ids they differ by 3e-5 at most (logits of deviation 1 to 60 at
# temperatures 0.01 to 5); those of another row or temperature differ by far more.
ATOM_SLACK = 1e-3
# A probability below what float32 holds weighs this or less.
LEAST_WEIGHT = 1.2e-38


@dataclass(frozen=True, slots=True)
class RowTable:
    """Holds ragged rows of distinct rising ids, while a DrawCache or a Selection is checked."""

    offsets_T1: OffsetArray
    ids_N: IntArray
    weight_N: FloatArray
    logp_N: FloatArray


def read_rows(
    url: str,
    payload: Mapping[str, Any],
    columns: Mapping[str, np.ndarray],
    logp: str,
    rows: int,
    request: RolloutRequest | ScoreRequest,
    vocab_size: int,
) -> RowTable:
    """Reads `columns` of `payload` as `rows` rows of rising ids, finite weights and log-probs.

    logp: the name of the log-probs. Raises BadReply. `check_weights` is the caller's, who knows
    which ids may weigh nothing.
    """
    for name, asked in (("num_atoms", request.num_atoms), ("num_draws", request.num_draws)):
        given = payload.get(name)
        require(url, is_int(given) and given == asked, f"asked for {name}={asked}, got {given!r}")
    length_T, ids_N, weight_N, logp_N = (
        columns[name] for name in ("length_T", "ids_N", "weight_N", logp)
    )
    require(url, len(length_T) == rows, f"rows of {len(length_T)} of {rows} tokens")
    require(url, bool((length_T > 0).all()), "a row is empty")
    offsets_T1 = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(length_T, out=offsets_T1[1:])
    sizes = {len(ids_N), len(weight_N), len(logp_N), int(offsets_T1[-1])}
    require(url, len(sizes) == 1, f"row arrays differ in length: {sorted(sizes)}")
    require(url, int(ids_N.min()) >= 0, "an id is negative")
    most = int(ids_N.max())
    require(url, most < vocab_size, f"id {most} is not of the vocabulary of {vocab_size}")
    rises = np.diff(ids_N) > 0
    rises[offsets_T1[1:-1] - 1] = True  # from one row to the next
    require(url, bool(rises.all()), "the ids of a row do not rise")
    check_logp(url, logp_N)
    mass_T = np.add.reduceat(np.exp(logp_N), offsets_T1[:-1])
    fits = bool((mass_T <= 1 + MASS_SLACK).all())
    require(url, fits, f"the log-probs of a row add up to {mass_T.max():.3g} instead of at most 1")
    return RowTable(offsets_T1, ids_N, weight_N, logp_N)


def check_weights(
    url: str, table: RowTable, num_atoms: int, num_draws: int, forced_N: np.ndarray
) -> None:
    """Raises BadReply for weights that no selection of num_atoms and num_draws can have.

    forced_N: bool, ids that may weigh 0: they are there whatever was selected.
    """
    weight_N, offsets_T1 = table.weight_N, table.offsets_T1
    require(url, bool(np.isfinite(weight_N).all()), "weight_N holds values that are not finite")
    require(url, bool((weight_N >= 0).all()), "weight_N holds negative weights")
    require(url, bool((forced_N | (weight_N > 0)).all()), "an id of weight 0 was not forced")
    selected_T = np.add.reduceat(weight_N > 0, offsets_T1[:-1], dtype=np.int32)
    fits = bool((selected_T <= num_atoms + num_draws).all())
    require(url, fits, f"a row selects more than {num_atoms} atoms and {num_draws} draws")
    sum_T = np.add.reduceat(weight_N, offsets_T1[:-1], dtype=np.float64)
    require(url, bool((sum_T <= 1 + WEIGHT_SLACK).all()), "the weights of a row exceed 1")
    # A row of fewer atoms than asked for holds every id that has a probability.
    whole_T = selected_T < num_atoms if num_draws == 0 else np.ones(len(sum_T), dtype=bool)
    full_T = (sum_T >= 1 - WEIGHT_SLACK) | ~whole_T
    require(url, bool(full_T.all()), "the weights of a row do not sum to 1")
    if num_draws == 0:
        _check_atoms(url, weight_N, table.logp_N)


def _check_atoms(url: str, weight_N: FloatArray, logp_N: FloatArray) -> None:
    """Raises BadReply where an id that was selected does not weigh what its log-prob says."""
    probs_N = np.exp(logp_N.astype(np.float64))
    far_N = np.abs(weight_N - probs_N) > ATOM_SLACK * probs_N + LEAST_WEIGHT
    wrong_N = np.flatnonzero(far_N & (weight_N > 0))
    if len(wrong_N):
        first = wrong_N[0]
        raise BadReply(
            f"{url}: an atom must weigh its probability, got a weight of {weight_N[first]:.6g} "
            f"beside a log-prob of {logp_N[first]:.6g}, whose exp is {probs_N[first]:.6g}"
        )


def join(request: ScoreRequest, given_logp_N: FloatArray, selected: RowTable) -> Selection:
    """Joins, row by row, the request's ids and the selected ones."""
    row_bits = np.int64(32)
    keys = np.concatenate(
        [
            (np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) << row_bits) | ids
            for offsets, ids in (
                (request.offsets_T1, np.asarray(request.ids_N, dtype=np.int64)),
                (selected.offsets_T1, selected.ids_N.astype(np.int64)),
            )
        ]
    )
    key_N, place = np.unique(keys, return_inverse=True)
    given_N, selected_N = np.split(place.astype(np.int64), [len(given_logp_N)])
    weight_N = np.zeros(len(key_N), dtype=np.float32)
    weight_N[selected_N] = selected.weight_N
    logp_N = np.empty(len(key_N), dtype=np.float32)
    logp_N[given_N] = given_logp_N
    logp_N[selected_N] = selected.logp_N
    offsets_T1 = np.searchsorted(key_N >> row_bits, np.arange(request.num_tokens + 1))
    ids_N = (key_N & ((1 << row_bits) - 1)).astype(np.int32)
    return Selection(offsets_T1, ids_N, weight_N, logp_N, given_N)


def check_logp(url: str, logp_N: FloatArray) -> None:
    """Raises BadReply for log-probs that are not finite or above 0."""
    require(url, bool(np.isfinite(logp_N).all()), "logp_N holds values that are not finite")
    require(url, bool((logp_N <= LOGP_SLACK).all()), "logp_N holds log-probs above 0")


def read_columns(
    url: str, payload: Mapping[str, Any], columns: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Reads arrays by name and type. Raises BadReply."""
    return {name: read_array(url, payload, name, dtype) for name, dtype in columns.items()}


def read_array(url: str, payload: Mapping[str, Any], name: str, dtype: str) -> np.ndarray:
    """Reads one array of a payload. Raises BadReply."""
    try:
        return unpack(payload.get(name), dtype)
    except ValueError as error:
        raise BadReply(f"{url}: {name}: {error}") from error


def is_int(value: Any) -> TypeGuard[int]:
    """Returns whether a JSON value is a whole number; true and false are not."""
    return type(value) is int


def require(url: str, condition: bool, what: str) -> None:
    """Raises BadReply that says `what` unless the condition holds."""
    if not condition:
        raise BadReply(f"{url}: {what}")
