"""Lengths follow from the seed of a request, and have the distribution that was asked for."""

import statistics

import pytest

from megatron_opd.sim.costs import LognormalLengths, RecordedLengths
from megatron_opd.sim.lengths import LengthDraws


def test_lengths_have_mean_and_spread() -> None:
    draws = LengthDraws(LognormalLengths(mean=500.0, cv=0.5, prompt_tokens=7), 10**6, seed=3)
    found = [draws.response(seed)[0] for seed in range(20_000)]
    assert statistics.mean(found) == pytest.approx(500, rel=0.02)
    assert statistics.stdev(found) == pytest.approx(250, rel=0.05)
    assert draws.prompt(1) == 7


def test_long_responses_are_cut_off_and_none_is_empty() -> None:
    draws = LengthDraws(LognormalLengths(mean=20.0, cv=5.0), 30, seed=3)
    found = [draws.response(seed) for seed in range(2000)]
    assert {tokens for tokens, is_cut in found if is_cut} == {30}
    assert min(tokens for tokens, _ in found) == 1
    assert any(not is_cut for _, is_cut in found)


def test_a_length_is_that_of_its_seed() -> None:
    lengths = LognormalLengths(mean=500.0, cv=1.0)
    one, same, other = (LengthDraws(lengths, 10**6, seed) for seed in (1, 1, 2))
    assert [one.response(i) for i in range(50)] == [same.response(i) for i in range(50)]
    assert [one.response(i) for i in range(50)] != [other.response(i) for i in range(50)]


def test_recorded_pairs_are_drawn_as_pairs() -> None:
    draws = LengthDraws(RecordedLengths(pairs=[(1, 10), (2, 20), (3, 30)]), 25, seed=0)
    found = {(draws.prompt(seed), *draws.response(seed)) for seed in range(100)}
    assert found == {(1, 10, False), (2, 20, False), (3, 25, True)}
    with pytest.raises(ValueError, match="at least one"):
        LengthDraws(RecordedLengths(pairs=[]), 25, seed=0)
