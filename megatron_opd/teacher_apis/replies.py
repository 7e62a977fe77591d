"""Reads the JSON of servers that are not ours, and makes of it what the bridge's client returns.

Nothing of a reply is believed: the ids that it echoes must be ours, each at its place, and every
number a finite log-prob. A row of likeliest ids must agree with the score of the id that was
sampled, which tells a table that is a row early or late from one that is not.

Axes: T sampled tokens, K likeliest ids of a row, N flattened ids, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from sglang_bridge.errors import BadReply, one_line
from sglang_bridge.parse import MAX_IDS
from sglang_bridge.protocol import (
    DrawCache,
    FinishReason,
    FloatArray,
    IntArray,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    Selection,
)
from sglang_bridge.tables import MASS_SLACK, RowTable, check_logp, is_int, join, require

NEAR_NATS = 1e-3
"""Two tables of one forward pass hold the same number of an id, but for its printed digits."""


def field(url: str, reply: Any, name: str, kind: type) -> Any:
    """Return a value of a JSON object. BadReply: it is missing, or of another kind."""
    value = cast(dict[str, Any], reply).get(name) if isinstance(reply, dict) else None
    require(url, type(value) is kind, f"{name} is missing or no {kind.__name__}")
    return value


def listed(url: str, reply: Any, name: str, count: int) -> list[Any]:
    """Return a list of so many values. BadReply: it is missing, or has more or fewer."""
    found: list[Any] = field(url, reply, name, list)
    require(url, len(found) == count, f"{name} holds {len(found)} of {count} values")
    return found


def ids_of(url: str, what: str, values: list[Any]) -> IntArray:
    """Return int32 ids. BadReply: one is no whole number from 0 on."""
    require(url, set(map(type, values)) <= {int}, f"{what} holds what is no id")
    bounded = not values or (min(values) >= 0 and max(values) < MAX_IDS)
    require(url, bounded, f"{what} holds an id outside 0..{MAX_IDS - 1}")
    return np.array(values, dtype=np.int32)


def logps_of(url: str, what: str, values: list[Any]) -> FloatArray:
    """Return float32 log-probs. BadReply: one is missing, above 0 or not finite."""
    require(url, set(map(type, values)) <= {float, int}, f"{what} holds what is no number")
    try:
        with np.errstate(over="ignore"):
            found = np.array(values, dtype=np.float64).astype(np.float32)
    except OverflowError:
        raise BadReply(f"{url}: {what} holds a number beyond all floats") from None
    check_logp(url, found)
    return found


def pairs_of(url: str, what: str, values: list[Any]) -> tuple[FloatArray, IntArray]:
    """Return log-probs and ids of `[[log-prob, id, ...], ...]`. BadReply."""
    whole = all(type(each) is list and len(cast(list[Any], each)) >= 2 for each in values)
    require(url, whole, f"{what} holds what is no pair of a log-prob and an id")
    logp = logps_of(url, what, [each[0] for each in values])
    return logp, ids_of(url, what, [each[1] for each in values])


def require_ours(url: str, what: str, echoed: IntArray, ours: Sequence[int] | IntArray) -> None:
    """Raise BadReply unless the ids that came back are those that were sent, each at its place."""
    sent = np.asarray(ours)
    if np.array_equal(echoed, sent):
        return
    if len(echoed) != len(sent):
        raise BadReply(
            f"{url}: {what} must be the {len(sent)} ids that were sent, got {len(echoed)}: the "
            "server drops or adds tokens, or cuts text again"
        )
    first = int(np.flatnonzero(echoed != sent)[0])
    raise BadReply(
        f"{url}: {what} must be the ids that were sent, got {echoed[first]} in place of "
        f"{sent[first]} at {first}: it re-tokenises, or scores other positions"
    )


def path_of(request: ScoreRequest) -> IntArray:
    """Return int32 [T]: the sampled ids of a request."""
    return np.asarray(request.input_ids, dtype=np.int32)[request.position_T + 1]


def top_table(
    url: str, rows: Sequence[tuple[FloatArray, IntArray]], path_T: IntArray, logp_T: FloatArray
) -> RowTable:
    """Return the likeliest ids of each row, each weighing its probability.

    rows: log-probs and ids of each row, at least one, in any order. path_T, logp_T: the sampled ids
    and their scores. BadReply: a row holds an id twice or sums to more than 1, or does not agree
    with the score of its sampled id.
    """
    found: list[tuple[IntArray, FloatArray]] = []
    for row, (logp_K, ids_K) in enumerate(rows):
        order_K = np.argsort(ids_K, kind="stable")
        ids_K, logp_K = ids_K[order_K], logp_K[order_K]
        require(url, len(ids_K) > 0, f"row {row} of the likeliest ids is empty")
        require(url, bool((np.diff(ids_K) > 0).all()), f"row {row} holds an id twice")
        same_K = ids_K == path_T[row]
        score = float(logp_T[row])
        mass = float(np.exp(logp_K.astype(np.float64)).sum())
        mass += 0.0 if same_K.any() else np.exp(score)
        require(url, mass <= 1 + MASS_SLACK, f"row {row} adds up to {mass:.3g} instead of 1")
        agrees = (
            abs(float(logp_K[same_K][0]) - score) <= NEAR_NATS
            if same_K.any()
            else score <= float(logp_K.min()) + NEAR_NATS
        )
        require(
            url,
            agrees,
            f"the likeliest ids of row {row} do not agree with the score {score:.4g} of the "
            "sampled id: they are those of another position",
        )
        found.append((ids_K, logp_K))
    offsets_T1 = np.cumsum([0, *(len(ids_K) for ids_K, _ in found)], dtype=np.int64)
    logp_N = np.concatenate([logp_K for _, logp_K in found])
    ids_N = np.concatenate([ids_K for ids_K, _ in found])
    return RowTable(offsets_T1, ids_N, np.exp(logp_N), logp_N)


def answered(
    url: str,
    request: RolloutRequest,
    ids_T: IntArray,
    finish_reason: FinishReason,
    scored: tuple[FloatArray, Sequence[tuple[FloatArray, IntArray]] | None] | None,
) -> RolloutReply:
    """Return an answer as the bridge's client does, of version 0.

    scored: the log-probs of its ids, and the likeliest ids of each; None where the server says
    none, and the reply has no cache then. BadReply: it is longer than was asked for.
    """
    tokens, most = len(ids_T), request.max_new_tokens
    require(url, tokens <= most, f"{tokens} tokens came back where at most {most} were asked for")
    spans = ((0, 0, tokens),) if tokens else ()
    if scored is None or tokens == 0:
        return RolloutReply(ids_T, finish_reason, None, spans, url)
    logp_T, rows = scored
    offsets_T1 = np.arange(tokens + 1, dtype=np.int64)
    if rows is None:
        ones_T = np.ones(tokens, dtype=np.float32)
        path = _cache(offsets_T1, ids_T, offsets_T1[:-1], ones_T, logp_T)
        return RolloutReply(ids_T, finish_reason, path, spans, url)
    given = [*request.input_ids]
    asked = ScoreRequest(
        rid=request.rid,
        input_ids=[*given, *ids_T.tolist()],
        runs=((len(given), len(given) + tokens),),
        offsets_T1=offsets_T1,
        ids_N=ids_T,
    )
    kept: Selection = join(asked, logp_T, top_table(url, rows, ids_T, logp_T))
    draws = _cache(kept.offsets_T1, kept.ids_N, kept.given_N, kept.weight_N, kept.logp_N)
    return RolloutReply(ids_T, finish_reason, draws, spans, url)


def _cache(
    offsets_T1: np.ndarray,
    ids_N: IntArray,
    path_T: np.ndarray,
    weight_N: FloatArray,
    logp_N: FloatArray,
) -> DrawCache:
    return DrawCache(
        offsets_T1=offsets_T1,
        ids_N=ids_N,
        path_T=path_T.astype(np.int64),
        weight_N=weight_N,
        sampler_logp_N=logp_N,
    )


def selected(
    request: ScoreRequest, path_logp_T: FloatArray, logp_N: FloatArray, table: RowTable
) -> ScoreReply:
    """Return the scores of a request's ids, joined with the likeliest ids of each row."""
    return ScoreReply(logp_N, join(request, logp_N, table))


def reason_of(url: str, kind: Any, matched: Any, stop: Sequence[str]) -> FinishReason:
    """Return why an answer ended. BadReply: for nothing that ends one.

    matched: what the server stopped at, where it says so: an id, or one of the strings `stop`.
    """
    require(url, kind in ("stop", "length"), f"finish_reason is {one_line(repr(kind), 60)}")
    if kind == "stop" and isinstance(matched, str) and matched in stop:
        return "stop_string"
    return cast(FinishReason, kind)


def count_of(url: str, reply: Any, name: str) -> int:
    """Return a whole number from 1 on. BadReply: it is none."""
    value = cast(dict[str, Any], reply).get(name) if isinstance(reply, dict) else None
    if not is_int(value) or not 0 < value < MAX_IDS:
        raise BadReply(f"{url}: {name} must be a whole number > 0, got {one_line(repr(value), 60)}")
    return value


def rows_where(
    url: str, values: list[Any], read: Callable[[Any], tuple[FloatArray, IntArray]]
) -> list[tuple[FloatArray, IntArray]]:
    """Return what `read` makes of each row. BadReply: a row is missing."""
    require(url, all(each is not None for each in values), "a row of likeliest ids is missing")
    return [read(each) for each in values]
