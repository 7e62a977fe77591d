"""Requests for draws and scores that a server refuses."""

from types import SimpleNamespace

import pytest

from sglang_bridge import wire
from sglang_bridge.server import validate
from sglang_bridge.server.compat import batches
from tests.support.server_requests import score_request


@pytest.mark.parametrize(
    ("start", "lengths", "ids", "message"),
    [
        (0, [1], [20], "ids to score must be in"),
        (0, [1], [-1], "ids to score must be in"),
        (5, [1, 1, 1], [1, 2, 3], "do not lie in the input"),
        (0, [2, -1], [1], "must not have fewer than 0 ids"),
        (0, [1], [1, 2], "at least one row must hold N=2 ids, got 1"),
        (0, [], [], "at least one row must hold N=0"),
    ],
)
def test_bad_score_requests_are_refused(start: int, lengths: list, ids: list, message: str):
    params = batches.custom_params(score_request(start, lengths, ids))
    with pytest.raises(ValueError, match=message):
        validate.check_score_params(params, num_input=7, vocab_size=20)


@pytest.mark.parametrize("start", [None, 0.0, float("inf"), float("nan"), "0"])
def test_a_first_row_that_is_no_whole_number_is_refused(start: object):
    params = dict(batches.custom_params(score_request(0, [1], [1])))
    params[wire.SCORE_START] = start
    with pytest.raises(ValueError, match=f"{wire.SCORE_START} must be a whole number, got"):
        validate.check_score_params(params, num_input=7, vocab_size=20)
    del params[wire.SCORE_START]
    with pytest.raises(ValueError, match=f"{wire.SCORE_START} must be a whole number, got None"):
        validate.check_score_params(params, num_input=7, vocab_size=20)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({wire.SCORE_TEMPERATURE: 0}, "temperature must be > 0 and finite, got 0"),
        ({wire.SCORE_ATOMS: 21}, "num_atoms must be at most the vocabulary, 20, got 21"),
        ({wire.SCORE_ATOMS: -1}, r"num_atoms must be in 0\.\.8192, got -1"),
        ({wire.SCORE_DRAWS: 65}, r"num_draws must be in 0\.\.64, got 65"),
        ({wire.SCORE_DRAWS: "4"}, "bridge_score_draws must be a whole number, got '4'"),
    ],
)
def test_bad_selections_are_refused(more: dict, message: str):
    params = batches.custom_params(score_request(0, [1], [1], **more))
    with pytest.raises(ValueError, match=message):
        validate.check_score_params(params, num_input=7, vocab_size=20)


@pytest.mark.parametrize(
    ("params", "sampling", "message"),
    [
        ({wire.NUM_DRAWS: 0, wire.NUM_ATOMS: 21}, {}, "num_atoms must be at most the vocabulary"),
        ({wire.NUM_DRAWS: 1.5}, {}, "bridge_num_draws must be a whole number, got 1.5"),
        ({wire.NUM_DRAWS: 65}, {}, r"num_draws must be in 0\.\.64, got 65"),
        ({wire.NUM_DRAWS: 0}, {"regex": "a"}, "cannot be combined with regex"),
    ],
)
def test_bad_draw_requests_are_refused(params: dict, sampling: dict, message: str):
    with pytest.raises(ValueError, match=message):
        validate.check_draw_params(params, SimpleNamespace(sampling_params=sampling), 20)
    validate.check_draw_params({wire.NUM_DRAWS: 0}, SimpleNamespace(sampling_params={}), 20)
