"""A whole reply is read exactly; any damage to it raises BadReply."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sglang_bridge import wire
from sglang_bridge.errors import BadReply, RequestAborted
from sglang_bridge.parse import parse_info, parse_pieces, parse_rollout, parse_scores
from sglang_bridge.protocol import RolloutRequest, ScoreRequest, WeightPiece
from tests.unit.bridge_replies import (
    REQUEST,
    SCORE_REQUEST,
    draws_payload,
    rollout_reply,
    score_reply,
)

URL = "http://host:1"


def test_rollout_is_read_exactly():
    reply = parse_rollout(URL, rollout_reply(), REQUEST)
    assert reply.output_ids_T.tolist() == [5, 9, 5]
    assert reply.output_ids_T.dtype == np.int32
    assert reply.finish_reason == "stop"
    assert reply.spans == ((3, 0, 2), (4, 2, 3))
    draws = reply.draws
    assert draws.offsets_T1.tolist() == [0, 2, 3, 6]
    assert draws.ids_N.tolist() == [5, 7, 9, 2, 5, 8]
    assert draws.count_N.tolist() == [1, 3, 4, 2, 0, 2]
    assert draws.path_T.tolist() == [0, 2, 4]
    assert draws.num_draws == 4
    dtypes = (draws.offsets_T1.dtype, draws.ids_N.dtype, draws.count_N.dtype, draws.logp_N.dtype)
    assert dtypes == (np.int64, np.int32, np.uint8, np.float32)


def test_plain_rollout_takes_the_engines_spans():
    plain = RolloutRequest(rid="r", input_ids=[1], max_new_tokens=3)
    reply = parse_rollout(URL, rollout_reply({}), plain)
    assert reply.draws is None
    assert reply.spans == ((3, 0, 3),)


def set_array(name: str, values: list, dtype: str) -> Callable[[dict[str, Any]], None]:
    return lambda payload: payload.update({name: wire.pack(np.array(values, dtype))})


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "array missing": (lambda p: p.pop("logp_N"), "logp_N: expected base64"),
    "not base64": (lambda p: p.update(ids_N="***"), "ids_N"),
    "half an item": (lambda p: p.update(ids_N=wire.pack(b"abcde")), "no whole number"),
    "fewer rows": (set_array("length_T", [2, 1], "u1"), "draws of 2 of 3 tokens"),
    "fewer paths": (set_array("path_T", [0, 0], "u1"), "path of 2 of 3"),
    "shorter ids": (set_array("ids_N", [5, 7, 9, 2, 5], "<i4"), "differ in length"),
    "shorter counts": (set_array("count_N", [4], "u1"), "differ in length"),
    "path outside": (set_array("path_T", [0, 1, 1], "u1"), "lacks its path token"),
    "wrong path": (set_array("path_T", [1, 0, 1], "u1"), "path tokens differ"),
    "empty row": (set_array("length_T", [3, 0, 3], "u1"), "lacks its path token"),
    "unsorted": (set_array("ids_N", [5, 7, 9, 2, 5, 4], "<i4"), "do not rise"),
    "repeated": (set_array("ids_N", [5, 5, 9, 2, 5, 8], "<i4"), "do not rise"),
    "lost draw": (set_array("count_N", [1, 2, 4, 2, 0, 2], "u1"), "does not count 4"),
    "undrawn id": (set_array("count_N", [1, 3, 4, 4, 0, 0], "u1"), "no draw hit"),
    "nan": (set_array("logp_N", [-1, np.nan, 0, -1, -2, -3], "<f4"), "not finite"),
    "minus inf": (set_array("logp_N", [-1, -np.inf, 0, -1, -2, -3], "<f4"), "not finite"),
    "positive": (set_array("logp_N", [-1, 0.5, 0, -1, -2, -3], "<f4"), "above 0"),
    "other width": (lambda p: p.update(num_draws=8), "asked for 4 draws"),
    "no versions": (lambda p: p.update(versions=[]), "no versions"),
    "late versions": (lambda p: p.update(versions=[["3", 1]]), "do not cover"),
    "beyond versions": (lambda p: p.update(versions=[["3", 0], ["4", 3]]), "do not cover"),
    "unordered versions": (lambda p: p.update(versions=[["3", 0], ["4", 2], ["5", 1]]), "cover"),
    "named version": (lambda p: p.update(versions=[["default", 0]]), "is not a number"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_draws_are_refused(damage: str):
    change, message = DAMAGES[damage]
    payload = draws_payload()
    change(payload)
    with pytest.raises(BadReply, match=message):
        parse_rollout(URL, rollout_reply(payload), REQUEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["meta_info"].pop(wire.PAYLOAD), "is the server's plugin active"),
        (lambda r: r["meta_info"].update({wire.PAYLOAD: []}), "is the server's plugin active"),
        (lambda r: r["meta_info"].update({wire.PAYLOAD: [{"scores": {}}]}), "plugin active"),
        (lambda r: r.pop("meta_info"), "meta_info is missing"),
        (lambda r: r.pop("output_ids"), "output_ids is missing"),
        (lambda r: r.update(output_ids=[]), "output_ids is empty"),
        (lambda r: r["meta_info"].update(id="other"), "asked for r, got the reply of other"),
        (lambda r: r["meta_info"].update(finish_reason={"type": "odd"}), "finish_reason is 'odd'"),
    ],
)
def test_damaged_envelopes_are_refused(change: Callable[[dict], Any], message: str):
    reply = rollout_reply()
    change(reply)
    with pytest.raises(BadReply, match=message):
        parse_rollout(URL, reply, REQUEST)


def test_an_aborted_request_is_not_a_short_response():
    reply = rollout_reply()
    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "gone"}
    with pytest.raises(RequestAborted, match="r was aborted: gone"):
        parse_rollout(URL, reply, REQUEST)


def test_scores_are_read_exactly():
    scores = parse_scores(URL, score_reply([-1.5, -2, 0]), SCORE_REQUEST)
    assert scores.logp_N.tolist() == [-1.5, -2, 0]
    assert scores.logp_N.dtype == np.float32


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([-1, -2], "2 scores for 3 ids"),
        ([-1, -2, np.nan], "not finite"),
        ([-1, -2, -np.inf], "not finite"),
        ([-1, -2, 3], "above 0"),
    ],
)
def test_damaged_scores_are_refused(scores: list[float], message: str):
    with pytest.raises(BadReply, match=message):
        parse_scores(URL, score_reply(scores), SCORE_REQUEST)


def test_missing_scores_are_refused():
    with pytest.raises(BadReply, match=r"bridge\.scores: is the server's plugin active"):
        parse_scores(URL, rollout_reply(), SCORE_REQUEST)


def test_pieces_and_info():
    rank = {"checksums": {"a.b|1|4|2|float32": "00ff"}, "parallelism_info": [{"tp_rank": 1}]}
    assert parse_pieces(URL, {"ranks": [rank]}) == [
        WeightPiece(1, "a.b", 1, 4, 2, "float32", "00ff")
    ]
    with pytest.raises(BadReply, match="does not describe a piece"):
        parse_pieces(URL, {"ranks": [{"checksums": {"a.b": "0"}, "parallelism_info": []}]})
    with pytest.raises(BadReply, match="ranks is missing"):
        parse_pieces(URL, {"success": True})
    described = {"ranks": [{"checksums": {"vocab_size": "512", "dtype": "bfloat16"}}]}
    server = {"tp_size": 2, "ep_size": 2, "max_total_num_tokens": 99}
    model = {"model_path": "m", "weight_version": "3"}
    info = parse_info(URL, server, model, {"data": [{"max_model_len": 64}]}, described)
    assert (info.vocab_size, info.context_length, info.tp_size, info.version) == (512, 64, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draws": 65}, r"num_draws must be in 0\.\.64, got 65"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"input_ids": []}, "input_ids must hold at least one token"),
    ],
)
def test_impossible_rollout_requests(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        RolloutRequest(**({"rid": "r", "input_ids": [1], "max_new_tokens": 1} | changes))


def test_impossible_score_requests():
    offsets, ids = np.array([0, 1]), np.array([3], np.int32)
    with pytest.raises(ValueError, match=r"got 5 for num_prompt_tokens=3, T=1"):
        ScoreRequest(rid="s", input_ids=[1] * 5, num_prompt_tokens=3, offsets_T1=offsets, ids_N=ids)
    with pytest.raises(ValueError, match=r"offsets_T1 must run from 0 to N=1, got 0\.\.2"):
        ScoreRequest(
            rid="s", input_ids=[1] * 4, num_prompt_tokens=3, offsets_T1=2 * offsets, ids_N=ids
        )
