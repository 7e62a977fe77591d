"""What an SGLang server answers with 200 -> rollouts, scores, weight digests, its own facts."""

from __future__ import annotations

import json
import math
import struct
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from checks.fuzz.engine import Target
from checks.fuzz.mutations import (
    Maker,
    damaged_bytes,
    damaged_tree,
    json_bytes,
    msgpack_bytes,
)
from sglang_bridge import arrays, parse, wire
from sglang_bridge.errors import BadReply, RequestAborted
from sglang_bridge.protocol import DrawCache, RolloutReply, RolloutRequest, ScoreRequest, Selection
from sglang_bridge.work import ServerWork

URL = "http://127.0.0.1:1"
VOCAB_SIZE = 64
KNOWN = parse.Known(VOCAB_SIZE, 32, 4)
SLACK = 1e-3

PLAIN = RolloutRequest(rid="r", input_ids=[1, 2, 3], max_new_tokens=6)
ROLLOUTS = {
    "plain": PLAIN,
    "path": replace(PLAIN, record=True),
    "draws": replace(PLAIN, num_draws=4),
    "atoms": replace(PLAIN, num_atoms=2),
    "both": replace(PLAIN, num_atoms=2, num_draws=2),
    "experts": replace(PLAIN, record=True, experts=True),
    "gates": replace(PLAIN, record=True, experts=True, gates=True),
}
SCORES = ScoreRequest(
    rid="s",
    input_ids=[1, 2, 3, 4, 5, 6, 7],
    runs=((2, 3), (5, 7)),
    offsets_T1=np.array([0, 2, 2, 3]),
    ids_N=np.array([7, 8, 9], np.int32),
)
SELECTIONS = {
    "scores": SCORES,
    "select": replace(SCORES, num_atoms=2, num_draws=2),
    "likeliest": replace(SCORES, num_atoms=2),
}
KINDS = wire.ROW_FIELDS | wire.DRAW_FIELDS | {"gates": "<f4"}
Given = tuple[str, bytes]


def call(given: Given) -> tuple[Any, Any]:
    """(the reply, what it was read as)."""
    kind, data = given
    decode = msgspec.msgpack.decode if kind in MADE else msgspec.json.decode
    try:
        reply = decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BadReply("neither JSON nor msgpack") from None
    if kind in ROLLOUTS:
        return reply, parse.parse_rollout(URL, reply, ROLLOUTS[kind], KNOWN)
    if kind in SELECTIONS:
        return reply, parse.parse_scores(URL, reply, SELECTIONS[kind], KNOWN)
    if kind == "pieces":
        return reply, parse.parse_pieces(URL, reply)
    if kind in RANKS:
        return reply, RANKS[kind](URL, reply)
    if kind == "version":
        return reply, parse.parse_version(URL, reply)
    parts = [*(reply if isinstance(reply, list) else []), None, None, None, None][:4]
    return reply, parse.parse_info(URL, *parts)


def oracle(given: Given, result: tuple[Any, Any]) -> str | None:
    """Every promise of the records' docstrings holds."""
    kind, (reply, found) = given[0], result
    if kind in ROLLOUTS:
        return _rollout_fault(ROLLOUTS[kind], reply, found)
    if kind in SELECTIONS:
        return _scores_fault(SELECTIONS[kind], found)
    if kind in RANKS:
        return _ranks_fault(kind, found)
    if kind == "version":
        return None if type(found) is int and found >= 0 else "a version is no number"
    if kind == "pieces":
        whole = all(
            min(p.rank, p.dim, p.start, p.length) >= 0 and (p.hf_name + p.digest).isprintable()
            for p in found
        )
        return None if whole and found else "a piece that is none"
    counts = (found.vocab_size, found.context_length, found.tp_size, found.ep_size)
    named = found.model_path.isprintable() and found.dtype.isprintable()
    least = min(*counts, found.max_total_tokens)
    return None if least > 0 and found.version >= 0 and named else "facts of no server"


def _ranks_fault(kind: str, found: Any) -> str | None:
    if kind == "progress":
        whole = all(isinstance(count, int) for count in found.tokens.values())
        return (
            None if whole and all(isinstance(rid, str) for rid in found.waiting) else "no progress"
        )
    if kind == "work":
        return None if msgspec.convert(msgspec.to_builtins(found), type(found)) else "no work"
    texts = [text for each in found for pair in each.items() for text in pair]
    return (
        None if found and all(isinstance(text, str) for text in texts) else "answers that are none"
    )


def _rollout_fault(request: RolloutRequest, reply: Any, found: RolloutReply) -> str | None:
    ids = found.output_ids_T.tolist()
    if ids_in(reply["output_ids"]) != ids:
        return "the ids are others than those sent"
    if not 0 < len(ids) <= request.max_new_tokens or not 0 <= min(ids) <= max(ids) < VOCAB_SIZE:
        return "ids beyond what was asked for"
    if reply["meta_info"]["id"] != request.rid or found.finish_reason not in ("stop", "length"):
        return "the reply of another request, or an unknown end"
    if not 0 <= found.cached_tokens < len(request.input_ids):
        return "more cached than was asked with"
    covered = [0]
    for version, start, stop in found.spans:
        if start != covered[-1] or stop <= start or not 0 <= version <= 4:
            return "spans do not cover the response, or name weights that there are not"
        covered.append(stop)
    versions = [span[0] for span in found.spans]
    if covered[-1] != len(ids) or versions != sorted(versions):
        return "spans end elsewhere, or weights become older"
    if (found.draws is None) is request.keeps_cache:
        return "a cache that nobody asked for, or none"
    if request.experts:
        experts = found.experts_XLk
        rows = len(request.input_ids) + len(ids) - 1
        if experts is None or experts.ndim != 3 or len(experts) != rows:
            return "experts of other inputs"
        gates = found.gates_XLk
        if (gates is None) is request.gates:
            return "gate weights that nobody asked for, or none"
        if gates is not None and not _are_gates(gates, experts):
            return "gate weights that are none"
    if found.draws is None:
        return None
    draws = found.draws
    path = draws.path_T.tolist()
    if len(path) != len(ids) or draws.ids_N[draws.path_T].tolist() != ids:
        return "the path is not the response"
    for t, (start, stop) in enumerate(pairwise(draws.offsets_T1.tolist())):
        if not start <= path[t] < stop:
            return "a path token of another row"
    num_draws = request.num_draws if request.selects else 1  # a path alone is one draw
    logp = draws.sampler_logp_N.tolist()
    return _table_fault(draws, logp, len(ids), request.num_atoms, num_draws, set(path))


def _are_gates(gates: np.ndarray, experts: np.ndarray) -> bool:
    sums = gates.astype(np.float64).sum(-1)
    return gates.shape == experts.shape and bool((gates >= 0).all() and (sums <= 1 + SLACK).all())


def _scores_fault(request: ScoreRequest, found: Any) -> str | None:
    logp = found.logp_N.tolist()
    if len(logp) != len(request.ids_N) or not all(math.isfinite(x) and x <= SLACK for x in logp):
        return "scores that are none"
    selected = found.selection
    if (selected is None) is request.selects:
        return "a selection that nobody asked for, or none"
    if selected is None:
        return None
    if selected.ids_N[selected.given_N].tolist() != request.ids_N.tolist():
        return "the ids given are not where they should be"
    given = set(selected.given_N.tolist())
    atoms, draws = request.num_atoms, request.num_draws
    logp = selected.logp_N.tolist()
    return _table_fault(selected, logp, request.num_tokens, atoms, draws, given, of_one=False)


def _table_fault(
    table: DrawCache | Selection,
    logp: list[float],
    rows: int,
    atoms: int,
    draws: int,
    forced: set[int],
    of_one: bool = True,
) -> str | None:
    """of_one: whether all log-probs of a row are from one answer of the server."""
    offsets, ids = table.offsets_T1.tolist(), table.ids_N.tolist()
    weights = table.weight_N.tolist()
    if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        return "rows that are not those of the response"
    if not len(ids) == len(weights) == len(logp):
        return "columns of several lengths"
    for start, stop in pairwise(offsets):
        row = ids[start:stop]
        if not row or sorted(set(row)) != row or row[0] < 0 or row[-1] >= VOCAB_SIZE:
            return "the ids of a row do not rise, or are none"
        if not all(math.isfinite(x) and x <= SLACK for x in logp[start:stop]):
            return "log-probs that are none"
        if of_one and sum(map(math.exp, logp[start:stop])) > 1.02:
            return "log-probs of no distribution"
        held = weights[start:stop]
        if not all(math.isfinite(w) and w >= 0 for w in held) or sum(held) > 1 + SLACK:
            return "weights that are none"
        if any(w == 0 and start + n not in forced for n, w in enumerate(held)):
            return "an id without a weight"
        if sum(w > 0 for w in held) > atoms + draws:
            return "more ids than were asked for"
        if draws and sum(held) < 1 - SLACK:
            return "weights that do not sum to 1"
        said = zip(held, logp[start:stop], strict=True)
        if not draws and any(w > 0 and abs(w - math.exp(x)) > SLACK for w, x in said):
            return "an atom that does not weigh its probability"
    return None


def table(rng: Random, ids: list[int] | None, rows: int, atoms: int, draws: int) -> dict[str, Any]:
    """Arrays of a valid table, as lists; ids: the path's, None for a selection."""
    fields = wire.ROW_FIELDS if ids is None else wire.DRAW_FIELDS
    found: dict[str, Any] = {name: [] for name in fields}
    logp = "logp_N" if ids is None else "sampler_logp_N"
    for row in range(rows):
        path = [] if ids is None else [ids[row]]
        chosen = rng.sample(range(VOCAB_SIZE), atoms + rng.randint(min(1, draws), draws))
        every = sorted({*chosen, *path})
        mass = 1 / (len(every) + 1)
        share = 1 / max(1, len(chosen)) if draws else mass
        found["length_T"].append(len(every))
        found["ids_N"] += every
        found["weight_N"] += [share if i in chosen else 0.0 for i in every]
        found[logp] += [math.log(mass)] * len(every)
        if ids is not None:
            found["path_T"].append(every.index(ids[row]))
    return found


INF, NAN = float("inf"), float("nan")
ODD = {
    "f": (INF, -INF, NAN, 0.0, -0.0, 1.0, 0.5, -0.5, 1.5, 1e-30, 3e38, -3e38, 1e-5, -100.0),
    "i": (-1, VOCAB_SIZE, 2**31 - 1, -(2**31), 0, 5),
    "u": (0, 1, 2, 7, 8, 64, 255),
}


def packed(rng: Random, columns: dict[str, Any], damage: bool) -> dict[str, Any]:
    """The arrays as they travel; damaged: one number, or the length of one, or its text."""
    name = rng.choice(list(columns))
    out: dict[str, Any] = {}
    for key, values in columns.items():
        kind = np.dtype(KINDS.get(key, "<u1"))
        column = np.array(values, kind)
        if damage and key == name and len(column):
            at = rng.randrange(len(column))
            edit = rng.choice(("set", "set", "set", "near", "drop", "double", "swap", "text"))
            if edit == "set":
                column[at] = rng.choice(ODD[kind.kind])
            elif edit == "near":
                column[at] = column[at] * 2 if rng.random() < 0.5 else column[at] / 2
            elif edit == "drop":
                column = np.delete(column, at)
            elif edit == "double":
                column = np.insert(column, at, column[at])
            elif edit == "swap":
                column = column[::-1]
            else:
                edits = damaged_bytes([travelling(rng, key, column)])
                out[key] = edits(rng)
                continue
        out[key] = travelling(rng, key, column)
    return out


def travelling(rng: Random, key: str, column: np.ndarray) -> bytes:
    """A column as a server sends it: exactly, or narrowed where there is a way to."""
    if rng.random() < 0.5 or not np.isfinite(column).all():
        return arrays.pack(column)
    if key == "weight_N":
        return arrays.pack_weights(column, rng.choice((2, 4)))
    return arrays.pack_logp(column) if key.endswith("logp_N") else arrays.pack(column)


def ids_in(raw: bytes) -> list[int]:
    """The whole numbers that travel in `raw`, read by hand."""
    code, rest = raw[:2], raw[4:]
    if code == b"u3":
        count = len(rest) // 3
        low = struct.unpack(f"<{count}H", rest[: 2 * count])
        return [a + (b << 16) for a, b in zip(low, rest[2 * count :], strict=True)]
    letter, width = {b"u1": ("B", 1), b"u2": ("H", 2), b"i4": ("i", 4)}[code]
    return list(struct.unpack(f"<{len(rest) // width}{letter}", rest))


def rollout(rng: Random, kind: str, damage: bool) -> Any:
    """A whole reply to ROLLOUTS[kind]."""
    request = ROLLOUTS[kind]
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
    turn = rng.randrange(len(ids))
    versions = [["3", 0], ["4", turn]] if turn else [["4", 0]]
    payload: dict[str, Any] = {}
    if request.keeps_cache:
        rows = table(rng, ids, len(ids), request.num_atoms, request.num_draws)
        counts = {"num_atoms": request.num_atoms, "num_draws": request.num_draws}
        payload[wire.DRAWS] = {**packed(rng, rows, damage), **counts, "versions": versions}
        if rng.random() < 0.5:
            starts = np.cumsum([0, *rows["length_T"][:-1]])
            path = [rows["sampler_logp_N"][i] for i in starts + rows["path_T"]]
            path[0] -= rng.choice((0, 0, 0, 1e-3, 1e-2, NAN)) * damage
            payload[wire.DRAWS][wire.PATH_LOGP] = arrays.pack(np.array(path, np.float32))
    if request.experts:
        flat = [rng.randrange(8) for _ in range(2 * 2 * (len(request.input_ids) + len(ids) - 1))]
        shape = {"layers": 2, "topk": 2, "num_experts": 8}
        columns: dict[str, Any] = {"experts": flat}
        if request.gates:
            columns["gates"] = np.full(len(flat), 0.5, np.float32)
        payload[wire.EXPERTS] = {**packed(rng, columns, damage), **shape}
    spans = [{"version": version, "start": start} for version, start in versions]
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "weight_versions": spans}
    meta["cached_tokens"] = rng.randrange(len(request.input_ids))
    sent = arrays.pack(np.array(ids))
    return {"output_ids": sent, "meta_info": {**meta, wire.PAYLOAD: [payload]}}


def scores(rng: Random, kind: str, damage: bool) -> Any:
    """A whole reply to SELECTIONS[kind]."""
    request = SELECTIONS[kind]
    payload = packed(rng, {"logp_N": [-1.0, -2.0, -0.5]}, damage and not request.selects)
    if request.selects:
        rows = table(rng, None, request.num_tokens, request.num_atoms, request.num_draws)
        counts = {"num_atoms": request.num_atoms, "num_draws": request.num_draws}
        payload[wire.SELECTION] = {**packed(rng, rows, damage), **counts}
    return {"meta_info": {"id": "s", wire.PAYLOAD: [{wire.SCORES: payload}]}}


RANKS: dict[str, Any] = {
    "progress": parse.parse_progress,
    "work": parse.parse_work,
    "answers": parse.parse_answers,
}


WORK = msgspec.to_builtins(ServerWork())


def ranks(answers: dict[str, Any]) -> dict[str, Any]:
    """What two ranks of a server answer to an action of the plugin, each in text."""
    texts = {name: json.dumps(value) for name, value in answers.items()}
    parallel = [[{"tp_rank": rank}] for rank in (0, 1)]
    return {"ranks": [{"checksums": texts, "parallelism_info": info} for info in parallel]}


FIXED: dict[str, Any] = {
    "progress": ranks({wire.RUNNING: {"r-1": 3, "r-2": 0}, wire.WAITING: ["r-3"]}),
    "work": ranks({wire.WORK: WORK}),
    "answers": ranks({wire.FREED: "weights,kv_cache"}),
    "pieces": {
        "ranks": [
            {
                "checksums": {"model.norm.weight|0|0|64|float32": "0123456789abcdef"},
                "parallelism_info": [{"tp_rank": rank}],
            }
            for rank in (0, 1)
        ]
    },
    "version": {"weight_version": "12"},
    "info": [
        {
            "tp_size": 1,
            "ep_size": 1,
            "max_total_num_tokens": 999,
            "enable_deterministic_inference": True,
        },
        {"model_path": "/m", "weight_version": "0"},
        {"data": [{"max_model_len": 32}]},
        {"ranks": [{"checksums": {"vocab_size": "64", "dtype": "float32"}}]},
    ],
}
MADE: dict[str, Any] = {
    **{kind: partial(rollout, kind=kind) for kind in ROLLOUTS},
    **{kind: partial(scores, kind=kind) for kind in SELECTIONS},
}


def make(rng: Random) -> Given:
    """(kind of reply, its bytes): damaged inside its arrays, in its tree, or in its bytes."""
    kind = rng.choice([*MADE, *FIXED])
    where = rng.choice(("arrays", "arrays", "tree", "tree", "bytes"))
    tree = MADE[kind](rng, damage=where == "arrays") if kind in MADE else FIXED[kind]
    if where == "tree" or (where == "arrays" and kind in FIXED):
        damage: Maker = damaged_tree([tree])
        tree = damage(rng)
    data = msgpack_bytes(tree) if kind in MADE else json_bytes(tree)
    if where == "bytes":
        at = rng.randrange(len(data))
        data = (
            data[:at]
            + rng.choice((b"", b"\xff", b"9", b'"', b"[", b"\\ud800", b"\xc4\x05"))
            + data[at + 1 :]
        )
    return kind, data


TARGET = Target("bridge_replies", make, call, (BadReply, RequestAborted), oracle, share=4)
