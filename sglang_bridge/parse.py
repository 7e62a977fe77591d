"""A reply is used only if it is whole: every array there, long enough, finite, consistent.

SGLang serves on without a plugin that failed to load, and a cut or shifted array looks like
training data. So each payload is checked by absolute index against the request, and anything else
raises BadReply.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from sglang_bridge import wire
from sglang_bridge.errors import BadReply, RequestAborted
from sglang_bridge.protocol import (
    DrawCache,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    ServerInfo,
    WeightPiece,
)

# Rounding may leave the log of a probability of 1 this far above 0.
LOGP_SLACK = 1e-4


def parse_rollout(url: str, reply: Any, request: RolloutRequest) -> RolloutReply:
    """The reply of /generate to `request`.

    Raises BadReply, or RequestAborted when the server gave up on it.
    """
    meta = _meta(url, reply)
    answered = meta.get("id")
    _require(url, answered == request.rid, f"asked for {request.rid}, got the reply of {answered}")
    reason = _field(url, meta, "finish_reason", dict)
    kind = reason.get("type")
    if kind == "abort":
        raise RequestAborted(f"{url}: request {request.rid} was aborted: {reason.get('message')}")
    _require(url, kind in ("stop", "length"), f"finish_reason is {kind!r}")
    output_ids = _field(url, reply, "output_ids", list)
    _require(url, len(output_ids) > 0, "output_ids is empty")
    ids_T = np.asarray(output_ids, dtype=np.int32)
    if request.num_draws == 0:
        spans = _native_spans(url, meta, len(ids_T))
        return RolloutReply(ids_T, kind, None, spans, url)
    payload = _payload(url, meta, wire.DRAWS)
    draws = _draw_cache(url, payload, ids_T, request.num_draws)
    spans = _run_lengths(url, payload.get("versions"), len(ids_T))
    return RolloutReply(ids_T, kind, draws, spans, url)


def parse_scores(url: str, reply: Any, request: ScoreRequest) -> ScoreReply:
    """The reply of /generate to a scoring request.

    Raises BadReply, also for a score that is not finite.
    """
    payload = _payload(url, _meta(url, reply), wire.SCORES)
    logp_N = _array(url, payload, "logp_N", "<f4")
    count = len(request.ids_N)
    _require(url, len(logp_N) == count, f"logp_N holds {len(logp_N)} scores for {count} ids")
    _require(url, bool(np.isfinite(logp_N).all()), "logp_N holds scores that are not finite")
    _require(url, bool((logp_N <= LOGP_SLACK).all()), "logp_N holds log-probs above 0")
    return ScoreReply(logp_N)


def parse_pieces(url: str, reply: Any) -> list[WeightPiece]:
    """The reply of /weights_checker to the action `bridge_pieces`: every rank's pieces."""
    pieces: list[WeightPiece] = []
    for position, info in enumerate(_field(url, reply, "ranks", list)):
        checksums = _field(url, info, "checksums", dict)
        parallelism = _field(url, info, "parallelism_info", list)
        rank = int(parallelism[0]["tp_rank"]) if parallelism else position
        for key, digest in checksums.items():
            fields = key.split(wire.PIECE_SEPARATOR)
            _require(url, len(fields) == 5, f"{key!r} does not describe a piece of weights")
            name, dim, start, length, dtype = fields
            piece = WeightPiece(rank, name, int(dim), int(start), int(length), dtype, digest)
            pieces.append(piece)
    _require(url, len(pieces) > 0, "no weight digests: is the server's plugin active?")
    return pieces


def parse_info(url: str, server: Any, model: Any, models: Any, plugin: Any) -> ServerInfo:
    """The replies of /server_info, /model_info, /v1/models and of the plugin's `bridge_model`."""
    ranks = _field(url, plugin, "ranks", list)
    _require(url, len(ranks) > 0, "no model description: is the server's plugin active?")
    described = _field(url, ranks[0], "checksums", dict)
    entries = _field(url, models, "data", list)
    _require(url, len(entries) > 0, "/v1/models names no model")
    return ServerInfo(
        url=url,
        model_path=_field(url, model, "model_path", str),
        vocab_size=int(described["vocab_size"]),
        context_length=_field(url, entries[0], "max_model_len", int),
        tp_size=_field(url, server, "tp_size", int),
        ep_size=_field(url, server, "ep_size", int),
        version=_version(url, model.get("weight_version")),
        dtype=described["dtype"],
        max_total_tokens=_field(url, server, "max_total_num_tokens", int),
    )


def parse_version(url: str, model: Any) -> int:
    """The weight version in a reply of /model_info."""
    return _version(url, _field(url, model, "weight_version", str))


def _draw_cache(url: str, payload: dict[str, Any], ids_T: np.ndarray, num_draws: int) -> DrawCache:
    arrays = {name: _array(url, payload, name, dtype) for name, dtype in wire.DRAW_FIELDS.items()}
    length_T, column_T = arrays["length_T"], arrays["path_T"].astype(np.int64)
    ids_N, count_N, logp_N = arrays["ids_N"], arrays["count_N"], arrays["logp_N"]
    given = payload.get("num_draws")
    _require(url, given == num_draws, f"asked for {num_draws} draws a token, got {given}")
    tokens = len(ids_T)
    _require(url, len(length_T) == tokens, f"draws of {len(length_T)} of {tokens} tokens")
    _require(url, len(column_T) == tokens, f"path of {len(column_T)} of {tokens} tokens")
    offsets_T1 = np.zeros(tokens + 1, dtype=np.int64)
    np.cumsum(length_T, out=offsets_T1[1:])
    sizes = {len(ids_N), len(count_N), len(logp_N), int(offsets_T1[-1])}
    _require(url, len(sizes) == 1, f"draw arrays differ in length: {sorted(sizes)}")
    _require(url, bool((column_T < length_T).all()), "a row lacks its path token")
    path_T = offsets_T1[:-1] + column_T
    _require(url, bool((ids_N[path_T] == ids_T).all()), "path tokens differ from output_ids")
    rises = np.diff(ids_N) > 0
    rises[offsets_T1[1:-1] - 1] = True  # from one row to the next
    _require(url, bool(rises.all()), "the ids of a row do not rise")
    drawn_T = np.add.reduceat(count_N.astype(np.int64), offsets_T1[:-1])
    _require(url, bool((drawn_T == num_draws).all()), f"a row does not count {num_draws} draws")
    undrawn = np.flatnonzero(count_N == 0)
    _require(url, bool(np.isin(undrawn, path_T).all()), "an id that no draw hit is cached")
    _require(url, bool(np.isfinite(logp_N).all()), "logp_N holds values that are not finite")
    _require(url, bool((logp_N <= LOGP_SLACK).all()), "logp_N holds log-probs above 0")
    return DrawCache(offsets_T1, ids_N, count_N, logp_N, path_T, num_draws)


def _run_lengths(url: str, runs: Any, tokens: int) -> tuple[tuple[int, int, int], ...]:
    """[[version, first token], ...] to (version, start, stop)."""
    _require(url, isinstance(runs, list) and len(runs) > 0, "no versions")
    versions = [_version(url, version) for version, _ in runs]
    edges = [start for _, start in runs] + [tokens]
    rising = edges[0] == 0 and all(a < b for a, b in pairwise(edges))
    _require(url, rising, f"versions do not cover {tokens} tokens: {runs}")
    return tuple((v, a, b) for v, (a, b) in zip(versions, pairwise(edges), strict=True))


def _native_spans(url: str, meta: dict[str, Any], tokens: int) -> tuple[tuple[int, int, int], ...]:
    """SGLang's own version spans; exact when weights change only under a retracting pause."""
    spans = _field(url, meta, "weight_versions", list)
    runs = [[span["version"], span["start"]] for span in spans if span["start"] < tokens]
    return _run_lengths(url, runs, tokens)


def _version(url: str, text: Any) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        raise BadReply(f"{url}: weight version {text!r} is not a number") from None


def _meta(url: str, reply: Any) -> dict[str, Any]:
    _require(url, isinstance(reply, dict), f"expected one reply object, got {type(reply).__name__}")
    return _field(url, reply, "meta_info", dict)


def _payload(url: str, meta: dict[str, Any], key: str) -> dict[str, Any]:
    wrapped = meta.get(wire.PAYLOAD)
    payload = wrapped[0] if isinstance(wrapped, list) and len(wrapped) == 1 else None
    found = payload.get(key) if isinstance(payload, dict) else None
    if not isinstance(found, dict):
        path = f"{wire.PAYLOAD}.{key}"
        raise BadReply(f"{url}: meta_info has no {path}: is the server's plugin active?")
    return found


def _field(url: str, reply: Any, name: str, kind: type) -> Any:
    value = reply.get(name) if isinstance(reply, dict) else None
    _require(url, isinstance(value, kind), f"{name} is missing or no {kind.__name__}")
    return value


def _array(url: str, payload: dict[str, Any], name: str, dtype: str) -> np.ndarray:
    try:
        return wire.unpack(payload.get(name), dtype)
    except ValueError as error:
        raise BadReply(f"{url}: {name}: {error}") from error


def _require(url: str, condition: bool, what: str) -> None:
    if not condition:
        raise BadReply(f"{url}: {what}")
