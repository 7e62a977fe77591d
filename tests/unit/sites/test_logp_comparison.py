"""Which site's log-probs are unlike the others', and what is not said of a sound one."""

import numpy as np
import pytest

from megatron_opd.sites.logp_comparison import GAP_NATS, MIN_COMPARED, LogpComparison


def filled(gaps, count=64, versions=2, spread=0.3):
    """Sites whose log-probs are apart by so much, on the same weights."""
    rng, found = np.random.default_rng(3), LogpComparison()
    for number in range(count):
        for site, gap in gaps.items():
            found.add(site, number % versions, float(rng.normal(-1.0 + gap, spread)))
    return found


def test_one_forger_among_sound_sites_is_found_and_no_other():
    found = filled({"a": 0.0, "b": 0.0, "c": 0.9})
    assert "+0.89" in found.fault_of("c")
    assert found.fault_of("a") is None
    assert found.fault_of("b") is None


@pytest.mark.parametrize(
    "gaps",
    [
        {"a": 0.0, "b": 0.0, "c": 0.0},
        {"a": 0.0, "b": 0.0, "c": GAP_NATS / 2},  # too small to be seen
        {"a": 0.0, "c": 0.9},  # of two nobody knows which one it is
    ],
)
def test_what_may_be_sound_is_not_suspect(gaps):
    found = filled(gaps, count=128)
    assert [found.fault_of(site) for site in gaps] == [None] * len(gaps)


def test_two_sites_that_differ_are_known_to_differ():
    gap = filled({"a": 0.0, "b": 0.9}).gap("a", "b")
    assert gap.is_far
    assert gap.nats == pytest.approx(-0.9, abs=0.2)


def test_few_responses_say_nothing():
    assert filled({"a": 0.0, "b": 0.0, "c": 2.0}, count=MIN_COMPARED - 1).fault_of("c") is None


def test_other_weights_are_not_compared():
    found = LogpComparison()
    for number in range(100):
        found.add("a", 0, -1.0 - number / 100)
        found.add("b", 0, -1.0 - number / 100)
        found.add("c", 1, -3.0 - number / 100)
    assert found.fault_of("c") is None


def test_ranks_of_equal_values_are_worth_a_half():
    found = LogpComparison()
    for _ in range(MIN_COMPARED):
        found.add("a", 0, -1.0)
        found.add("b", 0, -1.0)
    assert found.gap("a", "b").z == 0


def test_a_faulty_site_does_not_count_any_more():
    found = filled({"a": 0.0, "b": 0.0, "c": 0.9})
    found.forget("c")
    assert found.fault_of("c") is None
    assert found.gap("a", "c") is None
