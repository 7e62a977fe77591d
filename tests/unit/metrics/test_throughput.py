"""Throughput and the overlap of stages, by the formulas of App. G."""

import pytest

from megatron_opd.metrics.throughput import StageTimes, Throughput


def test_throughput_discards_five_updates():
    throughput = Throughput()
    assert throughput.tokens_per_s() is None
    for j in range(1, 9):
        throughput.add(100 * j, float(j * j))
    # (n_6 + n_7 + n_8) / (t_8 - t_5)
    assert throughput.tokens_per_s() == (600 + 700 + 800) / (64 - 25)
    assert throughput.tokens_per_s(warmup_updates=0) == sum(range(200, 900, 100)) / (64 - 1)


def test_overlap_follows_appendix_g():
    times = StageTimes(["a", "b"])
    times.add_rollout("a", 0.0, 4.0)
    times.add_rollout("a", 2.0, 6.0)
    times.add_rollout("b", 0.0, 2.0)
    times.teacher.add(4.0, 7.0)
    times.teacher.add(5.0, 6.0)
    times.train.add(6.0, 10.0)
    # rollout (6 + 2) / 2, teacher 3, train 4, wall 10
    assert times.overlap() == (4 + 3 + 4) / 10
    assert times.fleet_idle_ratio() == pytest.approx(0.6)
    assert times.learner_idle_ratio() == pytest.approx(0.6)
    times.paused.add(1.0, 2.0)
    times.weight_sync.add(9.0, 10.0)
    assert times.rollout_s == (5 + 1) / 2
    assert times.learner_idle_ratio() == pytest.approx(0.6), "sending while training counts once"


def test_overlap_of_perfect_and_serial_schedules():
    full, serial = StageTimes(["a"]), StageTimes(["a"])
    full.add_rollout("a", 0, 9)
    full.teacher.add(0, 9)
    full.train.add(0, 9)
    serial.add_rollout("a", 0, 3)
    serial.teacher.add(3, 6)
    serial.train.add(6, 9)
    assert (full.overlap(), serial.overlap()) == (3.0, 1.0)
    assert StageTimes(["a"]).overlap() is None
