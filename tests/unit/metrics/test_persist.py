"""Totals that are saved and restored make the same summary."""

import json

import pytest

from megatron_opd.metrics.persist import dump_totals, restore_totals
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Phase, WeightSyncReport
from tests.support.recorded_run import record

SHIFT_S = 1000.0


def test_the_summary_of_restored_totals_is_the_same(tmp_path):
    recorder, _ = record(tmp_path, drop={4})
    saved = json.loads(json.dumps(dump_totals(recorder.totals, 50.0)))
    back = RunTotals(["student-0"])
    restore_totals(back, saved, 50.0 + SHIFT_S)
    ours, theirs = (
        summarise(totals, recorder.accounting, 9.0, 2) for totals in (back, recorder.totals)
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        expected = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        assert ours[key] == expected, key
    assert back.drops == recorder.totals.drops
    assert back.drops.total() == 1


def test_what_is_counted_after_a_restore_is_added(tmp_path):
    recorder, _ = record(tmp_path)
    back = RunTotals(["another-name"])
    restore_totals(back, dump_totals(recorder.totals, 0.0), SHIFT_S)
    busy_s = recorder.totals.times.rollout["student-0"].seconds
    assert back.times.rollout["another-name"].seconds == pytest.approx(busy_s)
    count = back.publish_s.weight
    later = SHIFT_S + 500
    back.add_weight_sync(
        WeightSyncReport(9, (Phase("send", later, later + 2),), 10, later, later + 1)
    )
    assert back.publish_s.weight == count + 1
    assert back.times.weight_sync.seconds == pytest.approx(
        recorder.totals.times.weight_sync.seconds + 2
    )
