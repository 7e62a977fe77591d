"""A whole reply is read exactly; any damage to it raises BadReply."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sglang_bridge import wire
from sglang_bridge.arrays import F4, H1, I4, Q2, U1, U2, U3, pack, pack_logp
from sglang_bridge.errors import BadReply, RequestAborted
from sglang_bridge.parse import (
    parse_info,
    parse_pieces,
    parse_progress,
    parse_rollout,
    parse_scores,
    parse_work,
)
from sglang_bridge.protocol import RolloutRequest, ScoreRequest, ServerEnds, WeightPiece
from sglang_bridge.work import PassSums, ServerWork
from tests.support.bridge_replies import (
    REQUEST,
    SCORE_REQUEST,
    SELECT_REQUEST,
    URL,
    draws_payload,
    packed,
    rollout_reply,
    score_reply,
    selection_payload,
)


def test_rollout_is_read_exactly():
    reply = parse_rollout(URL, rollout_reply(), REQUEST)
    assert reply.output_ids_T.tolist() == [5, 9, 5]
    assert reply.output_ids_T.dtype == np.int32
    assert reply.finish_reason == "stop"
    assert reply.spans == ((3, 0, 2), (4, 2, 3))
    draws = reply.draws
    assert draws.offsets_T1.tolist() == [0, 2, 3, 6]
    assert draws.ids_N.tolist() == [5, 7, 9, 2, 5, 8]
    assert draws.weight_N.tolist() == [0.25, 0.75, 1, 0.5, 0, 0.5]
    assert draws.path_T.tolist() == [0, 2, 4]
    arrays = (draws.offsets_T1, draws.ids_N, draws.weight_N, draws.sampler_logp_N)
    assert [a.dtype for a in arrays] == [np.int64, np.int32, np.float32, np.float32]


def test_plain_rollout_takes_the_engines_spans():
    plain = RolloutRequest(rid="r", input_ids=[1, 2], max_new_tokens=3)
    reply = parse_rollout(URL, rollout_reply({}), plain)
    assert reply.draws is None
    assert reply.spans == ((3, 0, 3),)


def test_a_path_only_rollout_has_one_draw_a_token():
    request = replace(REQUEST, num_draws=0, record=True)
    arrays = {"length_T": [1] * 3, "path_T": [0] * 3, "ids_N": [5, 9, 5], "weight_N": [0] * 3}
    payload = {
        **draws_payload(),
        **packed({**arrays, "sampler_logp_N": [-1, -2, -3]}),
        "num_draws": 0,
    }
    draws = parse_rollout(URL, rollout_reply(payload), request).draws
    assert (draws.ids_N.tolist(), draws.path_T.tolist()) == ([5, 9, 5], [0, 1, 2])
    assert draws.weight_N.tolist() == [1, 1, 1]
    payload |= packed({"weight_N": [0, 0.5, 0]})
    with pytest.raises(BadReply, match="selects more than 0 atoms and 0 draws"):
        parse_rollout(URL, rollout_reply(payload), request)


def test_the_paths_log_probs_are_exact_beside_narrowed_ones():
    exact = np.array([-0.987654, -0.0123, -1.5], np.float32)
    logp = np.array([exact[0], -0.5, exact[1], -1, exact[2], -3], np.float32)
    narrow = draws_payload() | {"sampler_logp_N": pack_logp(logp)}
    payload = narrow | {wire.PATH_LOGP: pack(exact)}
    draws = parse_rollout(URL, rollout_reply(payload), REQUEST).draws
    np.testing.assert_array_equal(draws.sampler_logp_N[draws.path_T], exact)
    np.testing.assert_allclose(draws.sampler_logp_N, logp, atol=5e-5)
    for damaged, message in (
        (exact + np.float32(-0.01), "path_logp_T differs from sampler_logp_N"),
        (exact[:2], "path_logp_T of 2 values"),
        (np.full(3, np.nan, np.float32), "not finite"),
    ):
        reply = rollout_reply(narrow | {wire.PATH_LOGP: pack(damaged)})
        with pytest.raises(BadReply, match=message):
            parse_rollout(URL, reply, REQUEST)


def top_k(weights: list[float], num_atoms: int, logp: list[float] | None = None) -> dict[str, Any]:
    """A reply of atoms alone; their log-probs are those of the weights unless others are given."""
    if logp is None:
        logp = np.log(np.maximum(weights, 1e-3)).tolist()
    payload = draws_payload() | packed({"weight_N": weights, "sampler_logp_N": logp})
    return rollout_reply(payload | {"num_atoms": num_atoms, "num_draws": 0})


TOP_2 = replace(REQUEST, num_draws=0, num_atoms=2)
ALIKE = [0.5, 0.25, 1, 0.5, 0, 0.25]  # row 1 has one id: it can only be the whole of p


def test_a_top_k_row_may_sum_to_less_than_1_unless_it_holds_everything():
    assert parse_rollout(URL, top_k(ALIKE, 2), TOP_2).draws.weight_N.tolist() == ALIKE
    with pytest.raises(BadReply, match="do not sum to 1"):
        parse_rollout(URL, top_k([0.5, 0.25, 0.9, 0.5, 0, 0.25], 2), TOP_2)
    with pytest.raises(BadReply, match="exceed 1"):
        parse_rollout(URL, top_k([0.5, 0.505, 1, 0.5, 0, 0.25], 2), TOP_2)
    with pytest.raises(BadReply, match="more than 1 atoms"):
        parse_rollout(URL, top_k(ALIKE, 1), replace(TOP_2, num_atoms=1))


@pytest.mark.parametrize(
    ("column", "logp", "sound"),
    [
        (0, np.log(0.5) + 3e-5, True),
        (0, np.log(0.5) - 3e-5, True),
        (0, np.log(0.5) + 0.002, False),
        (0, np.log(0.5) - 0.002, False),
        (0, -200.0, False),
        (4, -0.9, True),  # the path token that was not selected weighs nothing, whatever it is
    ],
)
def test_an_atom_weighs_its_probability(column: int, logp: float, sound: bool):
    """Before: weights of one row beside the log-probs of another were trained on."""
    changed = np.log(np.maximum(ALIKE, 0.01)).tolist()
    changed[3:] = [-2.0, -3.0, -4.0]
    weights = [*ALIKE[:3], np.exp(-2.0), 0, np.exp(-4.0)]
    changed[column] = logp
    reply = top_k(weights, 2, changed)
    if sound:
        assert len(parse_rollout(URL, reply, TOP_2).draws.ids_N) == 6
        return
    with pytest.raises(BadReply, match=r"^http://host:1: an atom must weigh its probability"):
        parse_rollout(URL, reply, TOP_2)


def test_an_atom_too_unlikely_for_float32_may_weigh_the_least():
    logp = [np.log(0.5), -100.0, 0, np.log(0.5), -4, np.log(0.25)]
    weights = [0.5, 1.1754944e-38, 1, 0.5, 0, 0.25]
    assert parse_rollout(URL, top_k(weights, 2, logp), TOP_2).draws.weight_N[1] > 0


def test_a_teachers_atoms_weigh_their_probability_too():
    request = replace(SELECT_REQUEST, num_draws=0)
    arrays = {"length_T": [2, 1, 2], "ids_N": [2, 7, 4, 1, 9]}
    logp = [-0.75, -1.0, 0.0, -4.0, -0.25]
    payload = {"num_atoms": 2, "num_draws": 0} | packed({**arrays, "logp_N": logp})
    sound = payload | packed({"weight_N": np.exp(logp).tolist()})
    reply = parse_scores(URL, score_reply([-1, -2.5, -0.25], sound), request)
    assert reply.selection.ids_N.tolist() == [2, 7, 8, 4, 1, 9]
    swapped = payload | packed({"weight_N": np.exp([-1.0, -0.75, 0.0, -4.0, -0.25]).tolist()})
    with pytest.raises(BadReply, match="an atom must weigh its probability"):
        parse_scores(URL, score_reply([-1, -2.5, -0.25], swapped), request)


def set_array(name: str, values: list) -> Callable[[dict[str, Any]], None]:
    return lambda payload: payload.update(packed({name: values}))


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "array missing": (lambda p: p.pop("sampler_logp_N"), "sampler_logp_N: expected bytes"),
    "text": (lambda p: p.update(ids_N="***"), "ids_N: expected bytes, got str"),
    "no array": (lambda p: p.update(ids_N=b"***"), "ids_N: expected whole numbers"),
    "another kind": (lambda p: p.update(ids_N=F4 + b"abcd"), "ids_N: expected whole numbers"),
    "half an item": (lambda p: p.update(ids_N=I4 + b"abcde"), "not a whole number"),
    "fewer rows": (set_array("length_T", [2, 1]), "rows of 2 of 3 tokens"),
    "fewer paths": (set_array("path_T", [0, 0]), "path of 2 of 3"),
    "shorter ids": (set_array("ids_N", [5, 7, 9, 2, 5]), "differ in length"),
    "shorter weights": (set_array("weight_N", [1]), "differ in length"),
    "path outside": (set_array("path_T", [0, 1, 1]), "lacks its path token"),
    "wrong path": (set_array("path_T", [1, 0, 1]), "path tokens differ"),
    "empty row": (set_array("length_T", [3, 0, 3]), "a row is empty"),
    "negative id": (set_array("ids_N", [5, 7, 9, -2, 5, 8]), "negative"),
    "unsorted": (set_array("ids_N", [5, 7, 9, 2, 5, 4]), "do not rise"),
    "repeated": (set_array("ids_N", [5, 5, 9, 2, 5, 8]), "do not rise"),
    "lost draw": (set_array("weight_N", [0.25, 0.5, 1, 0.5, 0, 0.5]), "do not sum to 1"),
    "too heavy": (set_array("weight_N", [0.25, 1, 1, 0.5, 0, 0.5]), "exceed 1"),
    "undrawn id": (set_array("weight_N", [0.25, 0.75, 1, 1, 0, 0]), "not forced"),
    "negative weight": (set_array("weight_N", [1.5, -0.5, 1, 0.5, 0, 0.5]), "negative weights"),
    "nan weight": (set_array("weight_N", [1, np.nan, 1, 0.5, 0, 0.5]), "weight_N holds values"),
    "nan": (set_array("sampler_logp_N", [-1, np.nan, 0, -1, -2, -3]), "not finite"),
    "minus inf": (set_array("sampler_logp_N", [-1, -np.inf, 0, -1, -2, -3]), "not finite"),
    "positive": (set_array("sampler_logp_N", [-1, 0.5, 0, -1, -2, -3]), "above 0"),
    "other width": (lambda p: p.update(num_draws=8), "asked for num_draws=4, got 8"),
    "other atoms": (lambda p: p.pop("num_atoms"), "asked for num_atoms=0, got None"),
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
        (lambda r: r.pop("output_ids"), "output_ids: expected bytes, got NoneType"),
        (lambda r: r.update(output_ids=pack(np.array([], np.int32))), "output_ids is empty"),
        (lambda r: r["meta_info"].update(id="other"), "asked for r, got the reply of 'other'"),
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


def test_log_probs_of_a_row_are_of_one_distribution():
    """Before: two ids of probability 1 beside each other were trained on."""
    payload = draws_payload() | packed({"sampler_logp_N": [0, 0, 0, -1, -2, -3]})
    with pytest.raises(BadReply, match="log-probs of a row add up to 2 instead of at most 1"):
        parse_rollout("http://a", rollout_reply(payload), REQUEST)


def test_a_selection_is_joined_with_the_given_ids():
    """Given rows {7, 8}, {}, {9}; selected rows {2, 7, 9}, {4}, {1, 9, 30}."""
    reply = parse_scores(URL, score_reply([-1, -2.5, -0.25], selection_payload()), SELECT_REQUEST)
    assert reply.logp_N.tolist() == [-1, -2.5, -0.25]
    rows = reply.selection
    assert rows.offsets_T1.tolist() == [0, 4, 5, 8]
    assert rows.ids_N.tolist() == [2, 7, 8, 9, 4, 1, 9, 30]
    assert rows.weight_N.tolist() == [0.5, 0.25, 0, 0.25, 1, 0.125, 0.625, 0.25]
    assert rows.logp_N.tolist() == [-0.75, -1, -2.5, -2, 0, -4, -0.25, -3]
    assert rows.given_N.tolist() == [1, 2, 6]


def test_given_ids_in_any_order_are_found_again():
    request = replace(SELECT_REQUEST, ids_N=np.array([8, 7, 9], np.int32))
    reply = parse_scores(URL, score_reply([-2.5, -1, -0.25], selection_payload()), request)
    assert reply.selection.given_N.tolist() == [2, 1, 6]
    twice = replace(request, ids_N=np.array([8, 8, 9], np.int32))
    reply = parse_scores(URL, score_reply([-2.5, -2.5, -0.25], selection_payload()), twice)
    assert reply.selection.given_N.tolist() == [2, 2, 6]
    assert reply.selection.ids_N.tolist() == [2, 7, 8, 9, 4, 1, 9, 30]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_array("length_T", [3, 1]), "rows of 2 of 3 tokens"),
        (set_array("length_T", [4, 0, 3]), "a row is empty"),
        (set_array("weight_N", [0.5, 0.5, 0, 1, 0.125, 0.625, 0.25]), "not forced"),
        (set_array("weight_N", [0.5, 0.25, 0.25, 1, 0.125, 0.5, 0.25]), "do not sum to 1"),
        (set_array("logp_N", [0, -1, -2, 0, -np.inf, 0, 0]), "not finite"),
        (set_array("logp_N", [0, -1, -2, 0, np.nan, 0, 0]), "not finite"),
        (lambda p: p.update(num_draws=0), "asked for num_draws=2, got 0"),
    ],
)
def test_damaged_selections_are_refused(change: Callable[[dict], Any], message: str):
    payload = selection_payload()
    change(payload)
    with pytest.raises(BadReply, match=message):
        parse_scores(URL, score_reply([-1, -2.5, -0.25], payload), SELECT_REQUEST)


def test_a_missing_selection_is_refused():
    with pytest.raises(BadReply, match="selection is missing"):
        parse_scores(URL, score_reply([-1, -2, -3]), SELECT_REQUEST)


CODES = (F4, H1 + b"\4\0", I4, Q2, U1, U2, U3, b"")


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_damaged_byte_crashes_the_parser(data: st.DataObject):
    """Whatever one array says, the reply is read with its rows whole, or BadReply."""
    payload = draws_payload()
    name = data.draw(st.sampled_from(list(wire.DRAW_FIELDS)))
    raw = data.draw(st.binary(max_size=32))
    payload[name] = data.draw(st.sampled_from(CODES)) + raw
    try:
        draws = parse_rollout(URL, rollout_reply(payload), REQUEST).draws
    except BadReply:
        return
    assert draws.offsets_T1[-1] == len(draws.ids_N) == len(draws.weight_N)
    assert len(draws.sampler_logp_N) == len(draws.ids_N)
    assert np.allclose(np.add.reduceat(draws.weight_N, draws.offsets_T1[:-1]), 1, atol=2e-4)
    assert draws.ids_N[draws.path_T].tolist() == [5, 9, 5]


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
    described = {
        "ranks": [
            {
                "checksums": {
                    **{"vocab_size": "512", "dtype": "bfloat16", "quantization": "fp8"},
                    "ends": '{"model": [1, 7], "tokenizer": null}',
                },
                "parallelism_info": [],
            }
        ]
    }
    server = {"tp_size": 2, "ep_size": 2, "max_total_num_tokens": 99}
    server["enable_deterministic_inference"] = True
    model = {"model_path": "m", "weight_version": "3"}
    info = parse_info(URL, server, model, {"data": [{"max_model_len": 64}]}, described)
    assert (info.vocab_size, info.context_length, info.tp_size, info.version) == (512, 64, 2, 3)
    assert info.quantization == "fp8"
    assert info.ends == ServerEnds((1, 7), None)
    described["ranks"][0]["checksums"]["quantization"] = "none"
    info = parse_info(URL, server, model, {"data": [{"max_model_len": 64}]}, described)
    assert info.quantization is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draws": 65}, r"num_draws must be in 0\.\.64, got 65"),
        ({"num_draws": -1}, r"num_draws must be in 0\.\.64, got -1"),
        ({"num_atoms": 8193}, r"num_atoms must be in 0\.\.8192, got 8193"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"stop": ("x", "")}, "stop must hold no empty string"),
        ({"input_ids": []}, "input_ids must hold at least one token"),
    ],
)
def test_impossible_rollout_requests(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        RolloutRequest(**({"rid": "r", "input_ids": [1], "max_new_tokens": 1} | changes))


def test_impossible_score_requests():
    offsets, ids = np.array([0, 1]), np.array([3], np.int32)
    good = ScoreRequest(rid="s", input_ids=[1] * 4, runs=((3, 4),), offsets_T1=offsets, ids_N=ids)
    for runs, message in (
        ((), "at least one run of sampled ids, got none"),
        (((0, 4),), r"1 <= start < stop, got 0\.\.4"),
        (((1, 1), (3, 4)), r"1 <= start < stop, got 1\.\.1"),
        (((2, 3), (1, 4)), "must rise and not overlap, got 1 after stop=3"),
        (((1, 3), (2, 4)), "must rise and not overlap, got 2 after stop=3"),
        (((2, 3),), "must end with the last of 4 input_ids, got stop=3"),
        (((3, 5),), "must end with the last of 4 input_ids, got stop=5"),
        (((1, 2), (3, 4)), "an offset more than the runs have ids, T=2, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(good, runs=runs)
    with pytest.raises(ValueError, match=r"offsets_T1 must run from 0 to N=1, got 0\.\.2"):
        replace(good, offsets_T1=2 * offsets)
    for changes, message in (
        ({"temperature": 0.0}, "temperature must be > 0 and finite, got 0"),
        ({"temperature": float("nan")}, "temperature must be > 0 and finite, got nan"),
        ({"num_atoms": -1}, r"num_atoms must be in 0\.\.8192, got -1"),
        ({"num_draws": 65}, r"num_draws must be in 0\.\.64, got 65"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SCORE_REQUEST, **changes)


def test_a_record_is_kept_when_anything_is_asked_for():
    plain = RolloutRequest(rid="r", input_ids=[1], max_new_tokens=1)
    assert not plain.keeps_cache
    assert all(
        replace(plain, **{name: value}).keeps_cache
        for name, value in (("num_atoms", 1), ("num_draws", 1), ("record", True))
    )


def progress_reply(**said: str) -> dict:
    return {"ranks": [{"checksums": said, "parallelism_info": []}]}


def test_progress_is_read_from_the_first_rank():
    found = parse_progress("u", progress_reply(running='{"a": 3}', waiting='["b"]'))
    assert (found.tokens, found.waiting) == ({"a": 3}, {"b"})


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"running": "{}"},
        {"running": '{"a": "3"}', "waiting": "[]"},
        {"running": "{", "waiting": "[]"},
        {"running": "{}", "waiting": "[3]"},
        {"running": '{"\ud800": 3}', "waiting": "[]"},
        {"running": "[" * 100_000, "waiting": "[]"},
    ],
)
def test_progress_that_cannot_be_read_is_refused(said: dict):
    with pytest.raises(BadReply, match="progress cannot be read"):
        parse_progress("u", progress_reply(**said))


def test_work_is_read_from_the_first_rank():
    work = ServerWork(decode=PassSums().plus(3, 40, 0.5, 0.25))
    told = {"work": msgspec.json.encode(work).decode()}
    assert parse_work("u", progress_reply(**told)) == work


@pytest.mark.parametrize(
    "said", [{}, {"work": "{"}, {"work": '{"decode": {"gram": [1]}}'}, {"work": "\ud800"}]
)
def test_work_that_cannot_be_read_is_refused(said: dict):
    with pytest.raises(BadReply, match="u: its work cannot be read"):
        parse_work("u", progress_reply(**said))
