"""pass@k and errors over problems, against exact and obvious computations."""

import itertools
import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.evaluation.estimates import over_problems, pass_at_k


@given(st.data())
def test_pass_at_k_is_the_published_formula(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 60))
    correct = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    exact = 1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k))
    assert pass_at_k(correct, samples, k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_completions() -> None:
    outcomes = (True, False, False, True, False, False)
    for k in range(1, 7):
        choices = list(itertools.combinations(outcomes, k))
        share = sum(any(choice) for choice in choices) / len(choices)
        assert pass_at_k(2, 6, k) == pytest.approx(share)


def test_pass_at_k_of_many_samples_neither_overflows_nor_loses_digits() -> None:
    exact = 1 - Fraction(math.comb(99_990, 1000), math.comb(100_000, 1000))
    assert pass_at_k(10, 100_000, 1000) == pytest.approx(float(exact), rel=1e-9)
    assert pass_at_k(0, 100_000, 100_000) == 0
    assert pass_at_k(1, 100_000, 100_000) == 1


@pytest.mark.parametrize(
    ("given_counts", "message"),
    [
        ((-1, 4, 1), r"correct must be in 0\.\.4, got -1"),
        ((5, 4, 1), r"correct must be in 0\.\.4, got 5"),
        ((1, 4, 0), r"k must be in 1\.\.4, got 0"),
        ((1, 4, 5), r"k must be in 1\.\.4, got 5"),
    ],
)
def test_impossible_counts_are_refused(given_counts: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(*given_counts)


def test_errors_are_over_problems() -> None:
    values = [0.0, 0.5, 1.0, 0.25]
    found = over_problems(values)
    assert found.mean_pct == pytest.approx(43.75)
    assert found.stderr_pct == pytest.approx(100 * statistics.stdev(values) / 2)
    assert math.isnan(over_problems([0.5]).stderr_pct)
