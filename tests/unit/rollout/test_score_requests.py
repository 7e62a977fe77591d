"""What a teacher that reads another prompt is asked."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_ask

from megatron_opd.records.runs import SampledRun
from megatron_opd.records.types import VersionSpan
from megatron_opd.rollout.score_requests import TeacherAsk, asked_of
from sglang_bridge.arrays import pack
from tests.support.fakes import make_prompt, make_rollout

ROLLOUT = make_rollout(make_prompt(5), (VersionSpan(0, 0, 3),))


def ask(prompt_ids: list[int]) -> TeacherAsk:
    return TeacherAsk("s", 1.0, 2, 3, 7, 50, pack(np.array(prompt_ids, np.int32)))


@pytest.mark.parametrize("prompt", [[40], [40, 41, 42], [40, 41, 42, 43, 300]])
def test_the_response_follows_the_prompt_of_the_teacher(prompt: list[int]):
    found = asked_of(ROLLOUT, ask(prompt))
    assert list(found.input_ids) == [*prompt, 4, 4, 4]
    assert found.runs == ((len(prompt), len(prompt) + 3),)
    assert (found.num_atoms, found.num_draws, found.seed) == (2, 3, 7)
    assert found.ids_N is ROLLOUT.draws.ids_N
    assert list(ROLLOUT.sequences[0]) == [0, 1, 2, 4, 4, 4], "the student's stays"


def test_later_runs_keep_their_distance():
    """Of a sequence with given ids between."""
    ids_S = np.arange(9, dtype=np.int32)
    runs = (SampledRun(0, 3, 5, 0), SampledRun(0, 8, 9, 1))
    found = asked_of(replace(ROLLOUT, sequences=(ids_S,), runs=runs), ask([40]))
    assert list(found.input_ids) == [40, 3, 4, 5, 6, 7, 8]
    assert found.runs == ((1, 3), (6, 7))


def test_bytes_that_are_no_ids_are_an_error():
    with pytest.raises(ValueError, match="expected whole numbers"):
        asked_of(ROLLOUT, TeacherAsk("s", 1.0, 0, 0, 7, 50, b"\1"))


def test_what_is_given_between_runs_is_the_teachers_too():
    ids_S = np.arange(9, dtype=np.int32)
    runs = (SampledRun(0, 3, 5, 0), SampledRun(0, 8, 9, 1))
    between = pack(np.array([70, 71], np.int32))
    asked = replace_ask(ask([40]), between=(between,))
    found = asked_of(replace(ROLLOUT, sequences=(ids_S,), runs=runs), asked)
    assert list(found.input_ids) == [40, 3, 4, 70, 71, 8]
    assert found.runs == ((1, 3), (5, 6))
    with pytest.raises(ValueError, match="zip"):
        asked_of(ROLLOUT, asked)
