"""Checks replies: one is used only if every array is there, long enough, finite, consistent.

SGLang serves on without a plugin that failed to load, and a cut or shifted array looks like
training data. So each payload is checked by absolute index against the request, and anything else
raises BadReply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from sglang_bridge import wire
from sglang_bridge.arrays import MAX_ERROR
from sglang_bridge.columns import axis_of
from sglang_bridge.errors import BadReply, RankFailed, RequestAborted, one_line
from sglang_bridge.protocol import (
    DrawCache,
    ExpertArray,
    FloatArray,
    Progress,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    ServerEnds,
    ServerInfo,
    WeightPiece,
)
from sglang_bridge.tables import (
    WEIGHT_SLACK,
    check_logp,
    check_weights,
    is_int,
    join,
    read_array,
    read_columns,
    read_rows,
    require,
)
from sglang_bridge.weights.formats import HELD_AS
from sglang_bridge.work import ServerWork

# SGLang ends a response this near to the context's end, with the reason "length".
CONTEXT_SLACK = 8
MAX_IDS = 2**31  # for a vocabulary of unknown size: what int32 holds
MAX_EXPERTS = 2**16
MAX_DIGITS = 15
DIGEST_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Known:
    """Holds what is known of a server, against which its replies are checked; None: not yet.

    version: the newest weights that were synced to it.
    """

    vocab_size: int = MAX_IDS
    context_length: int | None = None
    version: int | None = None


NOTHING_KNOWN = Known()


def parse_rollout(
    url: str, reply: Any, request: RolloutRequest, known: Known = NOTHING_KNOWN
) -> RolloutReply:
    """Parses the reply of /generate to `request`.

    Raises BadReply, or RequestAborted when the server gave up on it.
    """
    meta = _meta(url, reply)
    answered = meta.get("id")
    require(url, answered == request.rid, f"asked for {request.rid}, got the reply of {answered!r}")
    reason = _field(url, meta, "finish_reason", dict)
    kind = reason.get("type")
    if kind == "abort":
        raise RequestAborted(f"{url}: request {request.rid} was aborted: {reason.get('message')}")
    require(url, kind in ("stop", "length"), f"finish_reason is {kind!r}")
    matched = reason.get("matched")
    if kind == "stop" and isinstance(matched, str):
        asked = matched in request.stop
        require(url, asked, f"stopped at {one_line(repr(matched), 60)}, which was not asked for")
        kind = "stop_string"
    ids_T = _output_ids(url, reply, known.vocab_size)
    prompt_tokens = len(request.input_ids)
    fault = length_fault(len(ids_T), kind, request.max_new_tokens, prompt_tokens, known)
    require(url, fault is None, fault or "")
    cached = _count(url, meta, "cached_tokens")
    require(url, cached < prompt_tokens, f"had {cached} of {prompt_tokens} input_ids in its cache")
    if not request.keeps_cache:
        spans = _native_spans(url, meta, len(ids_T), known)
        return RolloutReply(ids_T, kind, None, spans, url, cached_tokens=cached)
    payload = _payload(url, meta, wire.DRAWS)
    draws = _draw_cache(url, payload, ids_T, request, known)
    spans = _run_lengths(url, payload.get("versions"), len(ids_T), known)
    experts = gates = None
    if request.experts:
        inputs = len(request.input_ids) + len(ids_T) - 1
        payload = _payload(url, meta, wire.EXPERTS)
        experts = _experts(url, payload, inputs)
        gates = _gates(url, payload, experts) if request.gates else None
    return RolloutReply(ids_T, kind, draws, spans, url, experts, gates, cached)


def _output_ids(url: str, reply: Any, vocab_size: int) -> np.ndarray:
    ids_T = read_array(url, reply, "output_ids", "<i4")
    require(url, len(ids_T) > 0, "output_ids is empty")
    low, high = int(ids_T.min()), int(ids_T.max())
    require(url, low >= 0, f"output_ids holds {low}, and an id is not negative")
    require(url, high < vocab_size, f"output_ids holds {high}, the vocabulary has {vocab_size}")
    return ids_T


def length_fault(tokens: int, kind: str, most: int, prompt_tokens: int, known: Known) -> str | None:
    """Says why a response cannot have this length, or None.

    It has at most as many tokens as were asked for, and a length that ended it is that, or the
    context's.
    """
    if tokens > most:
        return f"asked for at most {most} tokens, got {tokens}"
    context = known.context_length
    if kind != "length" or tokens == most or context is None:
        return None
    if prompt_tokens + tokens + CONTEXT_SLACK >= context:
        return None
    return f"finish_reason is 'length' after {tokens} of {most} tokens"


def require_synced(url: str, version: int, known: Known) -> None:
    """Raises BadReply for a version that was not synced to the server, as far as is known."""
    newest = version if known.version is None else known.version
    require(url, version <= newest, f"version {version} was not synced yet, {newest} was")


def parse_scores(
    url: str, reply: Any, request: ScoreRequest, known: Known = NOTHING_KNOWN
) -> ScoreReply:
    """Parses the reply of /generate to a scoring request.

    Raises BadReply, also for a score that is not finite.
    """
    payload = _payload(url, _meta(url, reply), wire.SCORES)
    logp_N = read_array(url, payload, "logp_N", "<f4")
    count = len(request.ids_N)
    require(url, len(logp_N) == count, f"logp_N holds {len(logp_N)} scores for {count} ids")
    check_logp(url, logp_N)
    if not request.selects:
        return ScoreReply(logp_N)
    selection = _field(url, payload, wire.SELECTION, dict)
    columns = read_columns(url, selection, wire.ROW_FIELDS)
    selected = read_rows(
        url, selection, columns, "logp_N", request.num_tokens, request, known.vocab_size
    )
    nothing_forced_N = np.zeros(len(selected.ids_N), dtype=bool)
    check_weights(url, selected, request.num_atoms, request.num_draws, nothing_forced_N)
    return ScoreReply(logp_N, join(request, logp_N, selected))


def parse_pieces(
    url: str, reply: Any, *, digests: bool = True, none: bool = False
) -> list[WeightPiece]:
    """Parses every rank's pieces of weights.

    digests: their digests were asked for. none: there may be no pieces.
    """
    pieces: list[WeightPiece] = []
    for rank, answers in _by_rank(url, reply):
        pieces += [_piece(url, rank, key, digest, digests) for key, digest in answers.items()]
    require(url, none or len(pieces) > 0, "no pieces of weights: is the server's plugin active?")
    return pieces


def parse_expected(url: str, reply: Any) -> list[int]:
    """Parses how many bytes of weights every rank expects, in rank order."""
    ranks = _by_rank(url, reply)
    found = {
        rank: _number(url, "bytes to receive", answers.get(wire.RECEIVED_BYTES))
        for rank, answers in ranks
    }
    answered = sorted(rank for rank, _ in ranks)
    require(url, answered == list(range(len(ranks))), f"ranks {answered} answered")
    return [found[rank] for rank in answered]


def is_pending(url: str, reply: Any) -> bool:
    """Returns whether a rank is not done with an action of the plugin."""
    return any(wire.PENDING in answers for _, answers in _by_rank(url, reply))


def parse_done(url: str, reply: Any) -> None:
    """Parses the reply to an action that answers nothing but failures."""
    _by_rank(url, reply)


def parse_answers(url: str, reply: Any) -> list[dict[str, str]]:
    """Parses what every rank answered to an action of the plugin: text by name."""
    answers = [each for _, each in _by_rank(url, reply)]
    for each in answers:
        text = all(isinstance(word, str) for pair in each.items() for word in pair)
        require(url, text, "a rank answered other than text")
    return answers


def parse_freed(url: str, reply: Any) -> frozenset[str]:
    """Parses which tags of memory every rank frees when it gives them up."""
    answers = parse_answers(url, reply)
    require(url, all(wire.FREED in each for each in answers), "a rank does not say what it freed")
    return frozenset.intersection(
        *(frozenset(filter(None, each[wire.FREED].split(","))) for each in answers)
    )


def parse_progress(url: str, reply: Any) -> Progress:
    """Parses how far the server is with its requests: the answer of its first rank."""
    answer = parse_answers(url, reply)[0]
    try:
        tokens = msgspec.json.decode(answer.get(wire.RUNNING, ""), type=dict[str, int])
        waiting = msgspec.json.decode(answer.get(wire.WAITING, ""), type=list[str])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReply(f"{url}: its progress cannot be read ({error})") from error
    return Progress(tokens, frozenset(waiting))


def parse_work(url: str, reply: Any) -> ServerWork:
    """Parses what the server's first rank did."""
    answer = parse_answers(url, reply)[0]
    try:
        return msgspec.json.decode(answer.get(wire.WORK, ""), type=ServerWork)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReply(f"{url}: its work cannot be read ({error})") from error


def _by_rank(url: str, reply: Any) -> list[tuple[int, dict[str, Any]]]:
    """Returns what every rank answered to an action of the plugin, with its rank.

    Raises RankFailed when a rank answered that it failed.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    for position, info in enumerate(_field(url, reply, "ranks", list)):
        answers = _field(url, info, "checksums", dict)
        parallelism = _field(url, info, "parallelism_info", list)
        rank = _count(url, parallelism[0], "tp_rank") if parallelism else position
        if wire.ERROR in answers:
            said, lost = answers[wire.ERROR], wire.PEER_LOST in answers
            raise RankFailed(f"{url} rank {rank}: {said}", peer_lost=lost)
        found.append((rank, answers))
    require(url, len(found) > 0, "no rank answered: is the server's plugin active?")
    return found


def _piece(url: str, rank: int, key: str, digest: Any, digests: bool) -> WeightPiece:
    fields = key.split(wire.PIECE_SEPARATOR)
    whole = len(fields) == 5 and key.isprintable() and all(map(_is_number, fields[1:4]))
    require(url, whole, f"{key!r} does not describe a piece of weights")
    sound = isinstance(digest, str) and len(digest) <= DIGEST_DIGITS
    require(
        url,
        sound and (digest.isalnum() if digests else not digest),
        f"the digest of {key!r} is {digest!r}",
    )
    name, dim, start, length, dtype = fields
    return WeightPiece(rank, name, int(dim), int(start), int(length), dtype, digest)


def parse_info(url: str, server: Any, model: Any, models: Any, plugin: Any) -> ServerInfo:
    """Parses the replies of /server_info, /model_info, /v1/models and `bridge_model`."""
    _, described = _by_rank(url, plugin)[0]
    entries = _field(url, models, "data", list)
    require(url, len(entries) > 0, "/v1/models names no model")
    vocab_size = _number(url, "vocab_size", described.get("vocab_size"))
    require(url, 0 < vocab_size <= MAX_IDS, f"vocab_size is {vocab_size}")
    format = _text(url, described, wire.QUANTIZATION)
    require(url, format in (*HELD_AS, wire.NOT_QUANTISED), f"quantization is {format!r}")
    try:
        ends = msgspec.json.decode(_text(url, described, wire.ENDS), type=ServerEnds)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReply(f"{url}: its end tokens are unreadable: {one_line(str(error))}") from None
    return ServerInfo(
        url=url,
        model_path=_text(url, model, "model_path"),
        vocab_size=vocab_size,
        context_length=_count(url, entries[0], "max_model_len", least=1),
        tp_size=_count(url, server, "tp_size", least=1),
        ep_size=_count(url, server, "ep_size", least=1),
        version=parse_version(url, model),
        dtype=_text(url, described, "dtype"),
        max_total_tokens=_count(url, server, "max_total_num_tokens", least=1),
        deterministic=_field(url, server, "enable_deterministic_inference", bool),
        quantization=None if format == wire.NOT_QUANTISED else format,
        ends=ends,
    )


def parse_version(url: str, model: Any) -> int:
    """Returns the weight version in a reply of /model_info."""
    return _number(url, "weight version", _field(url, model, "weight_version", str))


def _draw_cache(
    url: str,
    payload: dict[str, Any],
    ids_T: np.ndarray,
    request: RolloutRequest,
    known: Known,
) -> DrawCache:
    tokens = len(ids_T)
    columns = read_columns(url, payload, wire.DRAW_FIELDS)
    table = read_rows(url, payload, columns, "sampler_logp_N", tokens, request, known.vocab_size)
    column_T = columns["path_T"].astype(np.int64)
    require(url, len(column_T) == tokens, f"path of {len(column_T)} of {tokens} tokens")
    inside = bool((column_T < np.diff(table.offsets_T1)).all())
    require(url, inside, "a row lacks its path token")
    path_T = table.offsets_T1[:-1] + column_T
    require(url, bool((table.ids_N[path_T] == ids_T).all()), "path tokens differ from output_ids")
    is_path_N = np.zeros(len(table.ids_N), dtype=bool)
    is_path_N[path_T] = True
    check_weights(url, table, request.num_atoms, request.num_draws, is_path_N)
    recorded = {name: columns[name] for name in wire.DRAW_COLUMNS}
    if wire.PATH_LOGP in payload:
        recorded["sampler_logp_N"] = _with_path(url, payload, table.logp_N, path_T)
    for name, column in recorded.items():
        needed = {"T": tokens, "N": len(table.ids_N)}[axis_of(name)]
        require(url, len(column) == needed, f"{name} of {len(column)} of {needed} values")
    if not request.selects:
        recorded["weight_N"] = np.ones(len(table.ids_N), dtype=np.float32)
    return DrawCache(offsets_T1=table.offsets_T1, ids_N=table.ids_N, path_T=path_T, **recorded)


def _with_path(
    url: str, payload: dict[str, Any], logp_N: FloatArray, path_T: np.ndarray
) -> FloatArray:
    """Returns the log-probs with those of the path as they were before they were narrowed."""
    exact_T = read_array(url, payload, wire.PATH_LOGP, "<f4")
    require(url, len(exact_T) == len(path_T), f"{wire.PATH_LOGP} of {len(exact_T)} values")
    check_logp(url, exact_T)
    near = np.abs(exact_T - logp_N[path_T]) <= MAX_ERROR
    require(url, bool(near.all()), f"{wire.PATH_LOGP} differs from sampler_logp_N")
    logp_N = logp_N.copy()
    logp_N[path_T] = exact_T
    return logp_N


def _experts(url: str, payload: dict[str, Any], inputs: int) -> ExpertArray:
    layers, topk, count = (
        _count(url, payload, name, least=1) for name in ("layers", "topk", "num_experts")
    )
    require(url, count <= MAX_EXPERTS, f"num_experts is {count}")
    flat = read_array(url, payload, "experts", "<u1" if count <= 256 else "<u2")
    require(
        url,
        inputs * layers * topk == len(flat),
        f"{len(flat)} routed experts for {inputs} inputs, {layers} layers, {topk} a token",
    )
    require(url, int(flat.max()) < count, f"expert {int(flat.max())} of {count}")
    return flat.reshape(inputs, layers, topk)


def _gates(url: str, payload: dict[str, Any], experts_XLk: ExpertArray) -> FloatArray:
    """Reads the weights of these experts; a token's are shares of 1, or a part of them."""
    flat = read_array(url, payload, "gates", "<f4")
    known = experts_XLk.size
    require(url, len(flat) == known, f"{len(flat)} gate weights for {known} routed experts")
    require(url, bool(np.isfinite(flat).all()), "gate weights hold values that are not finite")
    require(url, bool((flat >= 0).all()), "gate weights hold negative values")
    gates_XLk = flat.reshape(experts_XLk.shape)
    most = float(gates_XLk.sum(-1, dtype=np.float64).max())
    fits = most <= 1 + WEIGHT_SLACK
    require(url, fits, f"the gate weights of a token add up to {most:.6g} instead of at most 1")
    return gates_XLk


def _run_lengths(
    url: str, runs: Any, tokens: int, known: Known
) -> tuple[tuple[int, int, int], ...]:
    """Converts [[version, first token], ...] to (version, start, stop).

    Weights only become newer while a response grows, and never newer than what was synced.
    """
    require(url, isinstance(runs, list) and len(runs) > 0, "no versions")
    pairs = all(isinstance(run, Sequence) and len(run) == 2 for run in runs)
    require(url, pairs and all(is_int(run[1]) for run in runs), "versions are no pairs")
    versions = [_number(url, "weight version", version) for version, _ in runs]
    edges = [start for _, start in runs] + [tokens]
    rising = edges[0] == 0 and all(a < b for a, b in pairwise(edges))
    require(url, rising, f"versions do not cover {tokens} tokens: {runs}")
    require(url, versions == sorted(versions), f"versions fall: {versions}")
    require_synced(url, versions[-1], known)
    return tuple((v, a, b) for v, (a, b) in zip(versions, pairwise(edges), strict=True))


def _native_spans(
    url: str, meta: dict[str, Any], tokens: int, known: Known
) -> tuple[tuple[int, int, int], ...]:
    """Reads SGLang's own version spans; exact if weights change only under a retracting pause."""
    spans = _field(url, meta, "weight_versions", list)
    runs = [[_field(url, span, "version", str), _count(url, span, "start")] for span in spans]
    return _run_lengths(url, [run for run in runs if run[1] < tokens], tokens, known)


def _number(url: str, what: str, text: Any) -> int:
    """Reads a whole number >= 0, as labels hold it: decimal digits in a string, or a number."""
    if is_int(text) and 0 <= text < 10**MAX_DIGITS:
        return text
    shown = one_line(repr(text), 60)
    require(url, isinstance(text, str) and _is_number(text), f"{what} {shown} is not a number")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def _count(url: str, reply: Any, name: str, least: int = 0) -> int:
    """Reads a JSON number that is whole and >= `least`."""
    value = reply.get(name) if isinstance(reply, dict) else None
    if not is_int(value) or not least <= value < 10**MAX_DIGITS:
        raise BadReply(f"{url}: {name} must be a whole number >= {least}, got {value!r}")
    return value


def _text(url: str, reply: Any, name: str) -> str:
    """Reads a string that can be printed."""
    value = _field(url, reply, name, str)
    require(url, value.isprintable(), f"{name} holds control characters: {value!r}")
    return value


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
