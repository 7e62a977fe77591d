"""Checks the borders: what must be refused, by whom, and that JSON says what msgpack does."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.conformance.asking import Asked, farthest
from sglang_bridge.conformance.scores import Measured
from sglang_bridge.errors import BridgeError, ServerRefused
from sglang_bridge.http import HttpConnection
from sglang_bridge.protocol import ScoreRequest
from sglang_bridge.work_request import encode_score

REQUEST_ERRORS = range(400, 500)
UNAUTHORIZED = 401


async def json_is_the_same(asked: Asked) -> Measured:
    """Checks that scores as JSON are those of msgpack."""
    ids = asked.sequence(20)
    told = await asked.http.request("POST", wire.SCORE_ROUTE, {"input_ids": ids})
    logp_T = np.array(told["logp"], dtype=np.float64)[:, 0]
    return farthest(logp_T, await asked.path(ids)), asked.limit_nats


async def bad_json_is_refused(asked: Asked) -> Measured:
    """Checks that bad requests in JSON are refused. Measured: those that were not."""
    ids, size = asked.sequence(21, 6), asked.vocab_size
    bad: tuple[dict[str, Any], ...] = (
        {},
        {"input_ids": []},
        {"input_ids": ids[:1]},
        {"input_ids": [*ids[:-1], size]},
        {"input_ids": [size, *ids[1:]]},
        {"input_ids": [-1, *ids]},
        {"input_ids": ids, "runs": [[0, 6]]},
        {"input_ids": ids, "runs": [[1, 7]]},
        {"input_ids": ids, "runs": [[1, 5]]},
        {"input_ids": ids, "runs": [[2, 4], [3, 6]]},
        {"input_ids": ids, "runs": []},
        {"input_ids": ids, "ids": [[0]]},
        {"input_ids": ids, "ids": [[size], [], [], [], []]},
        {"input_ids": ids, "temperature": 0},
        {"input_ids": ids, "temperature": -1.0},
        {"input_ids": ids, "num_draws": 65},
        {"input_ids": ids, "num_atoms": size + 1},
        {"input_ids": ids, "unknown": 1},
    )
    refused = [
        await _is_refused(asked.http, wire.SCORE_ROUTE, "application/json", msgspec.json.encode(b))
        for b in bad
    ]
    return float(refused.count(False)), 0.0


async def bad_msgpack_is_refused(asked: Asked) -> Measured:
    """Checks that bad requests in msgpack are refused. Measured: those that were not."""
    ids = asked.sequence(22, 6)
    request = ScoreRequest(
        rid="bad",
        input_ids=ids,
        runs=((4, 6),),
        offsets_T1=np.array([0, 1, 2]),
        ids_N=np.array([0, 1], dtype=np.int32),
    )
    body = encode_score("conformance-bad.", request)
    changes = (
        {wire.SCORE_IDS: pack(np.array([0, asked.vocab_size]))},
        {wire.SCORE_IDS: pack(np.array([-1, 0]))},
        {wire.SCORE_IDS: b"??"},
        {wire.SCORE_RUNS: pack(np.array([4, 7]))},
        {wire.SCORE_RUNS: pack(np.array([0, 2]))},
        {wire.SCORE_LENGTHS: pack(np.array([1, 2]))},
        {wire.SCORE_TEMPERATURE: 0.0},
    )
    bodies = [b"", b"{}", body[:-1], *(_changed(body, change) for change in changes)]
    refused = [await _is_refused(asked.http, wire.WORK_ROUTE, wire.WORK_TYPE, b) for b in bodies]
    return float(refused.count(False)), 0.0


async def strangers_are_refused(asked: Asked) -> Measured:
    """Checks that a server with a key refuses requests without it, on both routes.

    Measured: what it did not. Without a key this holds of itself.
    """
    if asked.key is None:
        return 0.0, 0.0
    stranger, answered = HttpConnection(asked.http.url, timeout_s=asked.http.timeout_s), 0
    try:
        for route in (wire.WORK_ROUTE, wire.SCORE_ROUTE):
            try:
                await stranger.request("POST", route, {"input_ids": asked.sequence(23)})
            except ServerRefused as error:
                answered += error.status != UNAUTHORIZED
            else:
                answered += 1
    finally:
        await stranger.close()
    return float(answered), 0.0


async def still_answers(asked: Asked) -> Measured:
    """Checks that after all refusals the server scores as before."""
    ids = asked.sequence(1)
    rows = await asked.path(ids)
    return (0.0 if np.isfinite(rows).all() else math.inf), 0.0


def _changed(body: bytes, change: dict[str, Any]) -> bytes:
    tree = msgspec.msgpack.decode(body)
    tree["sampling_params"]["custom_params"] |= change
    return msgspec.msgpack.encode(tree)


async def _is_refused(http: HttpConnection, route: str, kind: str, body: bytes) -> bool:
    """Returns whether a body is answered by a status of 4xx and one line."""
    try:
        await http.exchange(route, kind, body, timeout_s=http.timeout_s, max_bytes=1 << 20)
    except ServerRefused as error:
        return error.status in REQUEST_ERRORS and bool(error.body)
    except BridgeError:
        return False
    return False


CHECKS = (
    json_is_the_same,
    bad_json_is_refused,
    bad_msgpack_is_refused,
    strangers_are_refused,
    still_answers,
)
