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
    ExpertArray,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    ServerInfo,
    WeightPiece,
)
from sglang_bridge.tables import (
    RowTable,
    check_logp,
    check_weights,
    join,
    read_array,
    read_rows,
    require,
)


def parse_rollout(url: str, reply: Any, request: RolloutRequest) -> RolloutReply:
    """The reply of /generate to `request`.

    Raises BadReply, or RequestAborted when the server gave up on it.
    """
    meta = _meta(url, reply)
    answered = meta.get("id")
    require(url, answered == request.rid, f"asked for {request.rid}, got the reply of {answered}")
    reason = _field(url, meta, "finish_reason", dict)
    kind = reason.get("type")
    if kind == "abort":
        raise RequestAborted(f"{url}: request {request.rid} was aborted: {reason.get('message')}")
    require(url, kind in ("stop", "length"), f"finish_reason is {kind!r}")
    output_ids = _field(url, reply, "output_ids", list)
    require(url, len(output_ids) > 0, "output_ids is empty")
    ids_T = np.asarray(output_ids, dtype=np.int32)
    if not request.keeps_cache:
        spans = _native_spans(url, meta, len(ids_T))
        return RolloutReply(ids_T, kind, None, spans, url)
    payload = _payload(url, meta, wire.DRAWS)
    draws = _draw_cache(url, payload, ids_T, request)
    spans = _run_lengths(url, payload.get("versions"), len(ids_T))
    experts = None
    if request.experts:
        inputs = len(request.input_ids) + len(ids_T) - 1
        experts = _experts(url, _payload(url, meta, wire.EXPERTS), inputs)
    return RolloutReply(ids_T, kind, draws, spans, url, experts)


def parse_scores(url: str, reply: Any, request: ScoreRequest) -> ScoreReply:
    """The reply of /generate to a scoring request.

    Raises BadReply, also for a score that is not finite.
    """
    payload = _payload(url, _meta(url, reply), wire.SCORES)
    logp_N = read_array(url, payload, "logp_N", "<f4")
    count = len(request.ids_N)
    require(url, len(logp_N) == count, f"logp_N holds {len(logp_N)} scores for {count} ids")
    check_logp(url, logp_N)
    if not request.selects:
        return ScoreReply(logp_N)
    selected = read_rows(
        url, _field(url, payload, wire.SELECTION, dict), request.num_tokens, request
    )
    nothing_forced_N = np.zeros(len(selected.ids_N), dtype=bool)
    check_weights(url, selected, request.num_atoms, request.num_draws, nothing_forced_N)
    return ScoreReply(logp_N, join(request, logp_N, selected))


def empty_scores(request: ScoreRequest) -> ScoreReply:
    """The reply to a request of no rows."""
    ids, values = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
    if not request.selects:
        return ScoreReply(values)
    offsets_T1 = np.zeros(1, dtype=np.int64)
    return ScoreReply(values, join(request, values, RowTable(offsets_T1, ids, values, values)))


def parse_pieces(url: str, reply: Any) -> list[WeightPiece]:
    """The reply of /weights_checker to the action `bridge_pieces`: every rank's pieces."""
    pieces: list[WeightPiece] = []
    for position, info in enumerate(_field(url, reply, "ranks", list)):
        checksums = _field(url, info, "checksums", dict)
        parallelism = _field(url, info, "parallelism_info", list)
        rank = int(parallelism[0]["tp_rank"]) if parallelism else position
        for key, digest in checksums.items():
            fields = key.split(wire.PIECE_SEPARATOR)
            require(url, len(fields) == 5, f"{key!r} does not describe a piece of weights")
            name, dim, start, length, dtype = fields
            piece = WeightPiece(rank, name, int(dim), int(start), int(length), dtype, digest)
            pieces.append(piece)
    require(url, len(pieces) > 0, "no weight digests: is the server's plugin active?")
    return pieces


def parse_info(url: str, server: Any, model: Any, models: Any, plugin: Any) -> ServerInfo:
    """The replies of /server_info, /model_info, /v1/models and of the plugin's `bridge_model`."""
    ranks = _field(url, plugin, "ranks", list)
    require(url, len(ranks) > 0, "no model description: is the server's plugin active?")
    described = _field(url, ranks[0], "checksums", dict)
    entries = _field(url, models, "data", list)
    require(url, len(entries) > 0, "/v1/models names no model")
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
        deterministic=_field(url, server, "enable_deterministic_inference", bool),
    )


def parse_version(url: str, model: Any) -> int:
    """The weight version in a reply of /model_info."""
    return _version(url, _field(url, model, "weight_version", str))


def _draw_cache(
    url: str, payload: dict[str, Any], ids_T: np.ndarray, request: RolloutRequest
) -> DrawCache:
    tokens = len(ids_T)
    table = read_rows(url, payload, tokens, request)
    column_T = read_array(url, payload, "path_T", wire.DRAW_FIELDS["path_T"]).astype(np.int64)
    require(url, len(column_T) == tokens, f"path of {len(column_T)} of {tokens} tokens")
    inside = bool((column_T < np.diff(table.offsets_T1)).all())
    require(url, inside, "a row lacks its path token")
    path_T = table.offsets_T1[:-1] + column_T
    require(url, bool((table.ids_N[path_T] == ids_T).all()), "path tokens differ from output_ids")
    is_path_N = np.zeros(len(table.ids_N), dtype=bool)
    is_path_N[path_T] = True
    num_atoms, num_draws = request.num_atoms, request.num_draws
    check_weights(url, table, num_atoms, num_draws, is_path_N)
    return DrawCache(
        table.offsets_T1, table.ids_N, table.weight_N, table.logp_N, path_T, num_atoms, num_draws
    )


def _experts(url: str, payload: dict[str, Any], inputs: int) -> ExpertArray:
    layers, topk, count = (
        _field(url, payload, name, int) for name in ("layers", "topk", "num_experts")
    )
    flat = read_array(url, payload, "experts", "<u1" if count <= 256 else "<u2")
    expected = inputs * layers * topk
    require(
        url,
        0 < expected == len(flat),
        f"{len(flat)} routed experts for {inputs} inputs, {layers} layers, {topk} a token",
    )
    require(url, int(flat.max()) < count, f"expert {int(flat.max())} of {count}")
    return flat.reshape(inputs, layers, topk)


def _run_lengths(url: str, runs: Any, tokens: int) -> tuple[tuple[int, int, int], ...]:
    """[[version, first token], ...] to (version, start, stop)."""
    require(url, isinstance(runs, list) and len(runs) > 0, "no versions")
    versions = [_version(url, version) for version, _ in runs]
    edges = [start for _, start in runs] + [tokens]
    rising = edges[0] == 0 and all(a < b for a, b in pairwise(edges))
    require(url, rising, f"versions do not cover {tokens} tokens: {runs}")
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
    require(url, isinstance(reply, dict), f"expected one reply object, got {type(reply).__name__}")
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
    require(url, isinstance(value, kind), f"{name} is missing or no {kind.__name__}")
    return value
