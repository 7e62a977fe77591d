"""What a client asks is what the server's process reads; other bytes are refused."""

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from sglang_bridge import wire
from sglang_bridge.arrays import unpack
from sglang_bridge.work_request import decode_work, encode_rollout, encode_score
from tests.support.bridge_replies import REQUEST, SCORE_REQUEST


def test_a_completion_is_asked_for_whole():
    asked = replace(REQUEST, stop=("end",), stop_token_ids=(7,), seed=2**62, temperature=0.5)
    found = decode_work(encode_rollout(asked))
    assert (found.rid, unpack(found.input_ids, "<i4").tolist()) == ("r", [1, 2, 3])
    sampling = found.sampling_params
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (8, 0.5, 1.0)
    assert (sampling.stop, sampling.stop_token_ids) == (["end"], [7])
    assert sampling.sampling_seed == 2**62
    assert sampling.custom_params == {wire.NUM_ATOMS: 0, wire.NUM_DRAWS: 4}
    assert not found.return_logprob


def test_what_is_wanted_besides_is_said():
    asked = replace(REQUEST, experts=True, gates=True, num_atoms=2, thin=True, exact=True)
    params = decode_work(encode_rollout(asked)).sampling_params.custom_params
    wanted = (wire.WANTS_EXPERTS, wire.WANTS_GATES, wire.THIN, wire.EXACT)
    assert [params[name] for name in wanted] == [True] * 4


@pytest.mark.parametrize("exact", [False, True])
def test_scores_are_asked_for_row_by_row(exact: bool):
    found = decode_work(encode_score("s-1.", replace(SCORE_REQUEST, exact=exact)))
    params = found.sampling_params.custom_params
    assert unpack(params[wire.SCORE_RUNS], "<i4").tolist() == [2, 3, 5, 7]
    assert unpack(params[wire.SCORE_LENGTHS], "<i4").tolist() == [2, 0, 1]
    assert unpack(params[wire.SCORE_IDS], "<i4").tolist() == [7, 8, 9]
    assert (found.return_logprob, found.logprob_start_len) == (True, 1)
    assert found.sampling_params.max_new_tokens == 0
    assert params.get(wire.EXACT, False) is exact


def test_a_small_vocabulary_costs_two_bytes_an_id():
    large = replace(SCORE_REQUEST, ids_N=np.array([7, 8, 70_000], np.int32))
    small = replace(SCORE_REQUEST, ids_N=np.array([7, 8, 60_000], np.int32))
    assert len(encode_score("s", large)) - len(encode_score("s", small)) == 3


GOOD = msgspec.msgpack.decode(encode_rollout(REQUEST))


@pytest.mark.parametrize(
    "change",
    [
        {"rid": 5},
        {"input_ids": [1, 2]},
        {"sampling_params": None},
        {"sampling_params": {"max_new_tokens": "9"}},
        {"sampling_params": {"max_new_tokens": 9, "regex": "a*"}},
        {"sampling_params": {"max_new_tokens": 9, "custom_params": {"a": [1]}}},
        {"return_routed_experts": True},
        {"stream": True},
        {"\x1b[2J": True},
        {"a" * 5000: True},
    ],
)
def test_what_is_no_request_is_refused(change: dict):
    decode_work(msgspec.msgpack.encode(GOOD))
    with pytest.raises(ValueError, match="not a request for work") as caught:
        decode_work(msgspec.msgpack.encode(GOOD | change))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"\xc1", b"\x91" * 5000, encode_rollout(REQUEST)[:-1]]
)
def test_bytes_that_are_none_are_refused(body: bytes):
    with pytest.raises(ValueError, match="not a request for work"):
        decode_work(body)
