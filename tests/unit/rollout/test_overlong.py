"""What the length of a response does to it."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.selection import FilterOverlong, KeepOverlong, MaskOverlong, SoftPenalty
from megatron_opd.records.types import Rollout, VersionSpan
from megatron_opd.rollout.overlong import Length, judged_length, soft_penalty
from tests.support.fakes import make_prompt, make_rollout

LIMIT = 8


def rollout(tokens: int) -> Rollout:
    made = make_rollout(make_prompt(3), (VersionSpan(0, 0, tokens),))
    return replace(made, finish_reason="length" if tokens == LIMIT else "stop")


def dapo_eq_13(tokens: int, limit: int, cache: int) -> Fraction:
    """R_length(y), case by case as printed."""
    if tokens <= limit - cache:
        return Fraction(0)
    if tokens <= limit:
        return Fraction(limit - cache - tokens, cache)
    return Fraction(-1)


@given(st.integers(1, 300), st.integers(1, 200), st.data())
def test_the_soft_penalty_is_dapos_equation_13(tokens: int, limit: int, data: st.DataObject):
    cache = data.draw(st.integers(1, limit))
    scale = data.draw(st.sampled_from([0.25, 1.0, 2.0]))
    exact = float(dapo_eq_13(tokens, limit, cache) * Fraction(scale))
    assert soft_penalty(tokens, limit, cache, scale) == pytest.approx(exact, abs=1e-15)


def test_the_soft_penalty_falls_from_the_cache_to_the_limit():
    config = SoftPenalty(cache=4, scale=2.0)
    found = [
        judged_length(config, rollout(tokens), LIMIT).penalty for tokens in range(1, LIMIT + 1)
    ]
    assert found == [0, 0, 0, 0, -0.5, -1.0, -1.5, -2.0]


def test_a_response_that_was_cut_is_dropped_masked_or_kept():
    with pytest.raises(ScoreRejected, match="overlong: cut at 8 tokens"):
        judged_length(FilterOverlong(), rollout(LIMIT), LIMIT)
    assert judged_length(MaskOverlong(), rollout(LIMIT), LIMIT) == Length(masked=True)
    assert judged_length(KeepOverlong(), rollout(LIMIT), LIMIT) == Length()


@pytest.mark.parametrize("config", [FilterOverlong(), MaskOverlong(), KeepOverlong()])
def test_one_that_ended_by_itself_is_left_alone(config):
    assert judged_length(config, rollout(LIMIT - 1), LIMIT) == Length()
