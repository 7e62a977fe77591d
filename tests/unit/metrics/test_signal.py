"""A run that teaches nothing says so once, and once when it teaches again."""

import logging
from dataclasses import dataclass, replace

import pytest

from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.signal import SignalWatch
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting, Depths, Phase, WeightSyncReport
from megatron_opd.records.types import Batch
from tests.support.fakes import Figures, make_sample


@dataclass(frozen=True)
class Reported(Figures):
    stopped_fraction: float | None = None
    importance_mean: float | None = None


@pytest.mark.parametrize(
    ("figures", "uniform", "words"),
    [
        (Reported(grad_norm=0.0), 1.0, "all rewards of every group are equal (gradient norm 0)"),
        (Reported(grad_norm=0.5), 1.0, "comes from other terms"),
        (Reported(grad_norm=0.0, stopped_fraction=1.0), 0.5, "trust region stops every ratio"),
        (Reported(grad_norm=0.0, importance_mean=0.0), None, "correction masks every token"),
        (Reported(grad_norm=0.0), None, "gradient norm is exactly 0"),
        (Reported(grad_norm=1e-30), 0.99, None),
        (Reported(grad_norm=0.5, stopped_fraction=1.0), None, None),
    ],
)
def test_why_an_update_teaches_nothing(figures, uniform, words):
    why, line = SignalWatch(reads_groups=True, patience=1).add(figures, uniform)
    assert (why is None) == (words is None) == (line is None)
    if words is not None:
        assert words in why
        assert line == f"nothing is learned: 1 updates in a row, {why}"


def test_equal_rewards_do_not_matter_to_an_objective_without_groups():
    assert SignalWatch(reads_groups=False, patience=1).add(Reported(), 1.0) == (None, None)


def test_a_streak_is_said_once_when_long_enough_and_once_at_its_end():
    watch = SignalWatch(reads_groups=True, patience=3)
    zero, good = Reported(grad_norm=0.0), Reported()
    lines = [watch.add(each, 0.0)[1] for each in [zero, zero, good, *[zero] * 5, good, good, zero]]
    said = {index: line for index, line in enumerate(lines) if line is not None}
    assert list(said) == [5, 8]
    assert said[5].startswith("nothing is learned: 3 updates in a row")
    assert said[8] == "there is a signal again, after 5 updates without one"


def test_the_recorder_says_it_counts_it_and_the_summary_has_it(caplog: pytest.LogCaptureFixture):
    rows: list[dict] = []

    class Rows:
        def write(self, update, row):
            rows.append(dict(row))

        def close(self):
            pass

    totals = RunTotals(group_size=2)
    recorder = RunRecorder(totals, [Rows()], signal=SignalWatch(reads_groups=True, patience=2))
    samples = tuple(replace(make_sample(uid), reward=1.0) for uid in range(4))
    mixed = (*samples[:3], replace(samples[3], reward=0.0))
    depths = Depths(0, 0, 0, 0, 1)
    with caplog.at_level(logging.WARNING):
        for update, batch in enumerate([samples, samples, samples, mixed]):
            figures = Figures(update=update, grad_norm=0.0 if batch is samples else 1.0)
            recorder.trained(Batch(update, update, batch), figures, update, update + 0.5)
            phase = Phase("send", update + 0.5, update + 0.6)
            report = WeightSyncReport(update + 1, (phase,), 1, update + 0.5, update + 0.6)
            recorder.weights_synced(Batch(update, update, batch), report, depths)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "nothing is learned",
        "there is a signal again, after 3 updates without one",
    ]
    assert [row["without_signal"] for row in rows] == [1, 1, 1, 0]
    accounting = Accounting(4, 4, 16, 16, {}, 0, False)
    assert summarise(totals, accounting, 1.0, 1)["updates_without_signal"] == 3
