"""Requests for draws and scores that a server refuses."""

from types import SimpleNamespace

import numpy as np
import pytest

from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.server import validate
from sglang_bridge.server.compat import batches
from sglang_bridge.server.text import to_text
from tests.support.server_requests import scored_request


@pytest.mark.parametrize(
    ("runs", "lengths", "ids", "message"),
    [
        ([(6, 7)], [1], [20], "ids to score must be in"),
        ([(6, 7)], [1], [-1], "ids to score must be in"),
        ([(5, 8)], [1, 1, 1], [1, 2, 3], "must end with the last of 7 input_ids, got stop=8"),
        ([(1, 2**30)], [1], [1], "must end with the last of 7 input_ids, got stop=1073741824"),
        ([(2, 4), (3, 7)], [0] * 6, [], "not overlap, got 3 after stop=4"),
        ([(0, 7)], [0] * 7, [], r"1 <= start < stop, got 0\.\.7"),
        ([], [], [], "at least one run of sampled ids, got none"),
        ([(5, 7)], [2, -1], [1], "must not have fewer than 0 ids"),
        ([(6, 7)], [1], [1, 2], "1 rows must hold N=2 ids, got 1 rows of 1"),
        ([(2, 4), (6, 7)], [1, 1], [1, 2], "3 rows must hold N=2 ids, got 2 rows of 2"),
    ],
)
def test_bad_score_requests_are_refused(runs: list, lengths: list, ids: list, message: str):
    params = batches.custom_params(scored_request(runs, lengths, ids))
    with pytest.raises(ValueError, match=message):
        validate.check_score_params(params, num_input=7, vocab_size=20)


@pytest.mark.parametrize("runs", [None, 5, "*", to_text(pack(np.array([1, 4, 7])))])
def test_runs_that_are_no_pairs_are_refused(runs: object):
    params = dict(batches.custom_params(scored_request([(6, 7)], [1], [1])))
    validate.check_score_params(params, num_input=7, vocab_size=20)
    params[wire.SCORE_RUNS] = runs
    with pytest.raises(ValueError, match=r"an array as text|base64|a run, got 3 numbers"):
        validate.check_score_params(params, num_input=7, vocab_size=20)
    del params[wire.SCORE_RUNS]
    with pytest.raises(ValueError, match="expected an array as text, got NoneType"):
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
    params = batches.custom_params(scored_request([(6, 7)], [1], [1], **more))
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


@pytest.mark.parametrize("ids", [[20], [3, -1], [2**31 - 1, 0]])
def test_an_input_id_beyond_the_embedding_is_refused(ids: list[int]):
    """It would end the scheduler, and with it the server."""
    validate.check_input_ids([0, 19], 20)
    validate.check_input_ids(None, 20)
    with pytest.raises(ValueError, match=r"input_ids must be in 0\.\.19"):
        validate.check_input_ids(ids, 20)
