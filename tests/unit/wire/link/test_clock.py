"""Offsets between clocks, from heartbeats whose two ways take different times."""

import random

import pytest

from megatron_opd.wire.link.clock import ClockEstimate


def test_nothing_is_known_before_an_answer():
    assert ClockEstimate().rtt_s is None
    assert ClockEstimate().offset_s is None


@pytest.mark.parametrize("offset_s", [-3600.0, 0.0, 12.5])
def test_the_offset_is_right_within_half_of_the_quickest_round_trip(offset_s: float):
    chance, clock, now_s, quickest_s = random.Random(0), ClockEstimate(), 1e9, 1e9
    for _ in range(8):
        there_s, back_s = chance.uniform(0, 0.2), chance.uniform(0, 0.2)
        received_s = now_s + there_s + offset_s
        clock.add(now_s, received_s, received_s + 1.0, now_s + there_s + 1.0 + back_s)
        assert clock.rtt_s == pytest.approx(there_s + back_s, abs=1e-6)
        quickest_s = min(quickest_s, there_s + back_s)
        now_s += 5
    assert clock.offset_s is not None
    assert abs(clock.offset_s - offset_s) <= quickest_s / 2 + 1e-6


@pytest.mark.parametrize(
    "times",
    [(10.0, 20.0, 19.0, 11.0), (10.0, 10.5, 12.0, 11.0), (10.0, 10.0, 10.0, 9.0)],
    ids=["sent before received", "longer there than away", "our clock was set back"],
)
def test_times_that_cannot_be_are_passed_over(times: tuple[float, float, float, float]):
    clock = ClockEstimate()
    clock.add(*times)
    assert clock.offset_s is None


def test_times_that_are_no_numbers_are_passed_over():
    clock = ClockEstimate()
    clock.add(1.0, float("nan"), 2.0, 3.0)
    assert clock.offset_s is None
    clock.add(1.0, float("-inf"), float("inf"), 3.0)
    assert clock.offset_s is None
