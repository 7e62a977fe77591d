"""Replayed routing beside routing chosen anew."""

import json

import pytest

from megatron_opd.metrics.persist import dump_totals, restore_totals
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.records.types import Batch
from tests.support.fakes import Figures, Learner, make_sample
from tests.support.recorded_run import record


def routed(update):
    """Replayed in every update, compared in every second one."""
    free = {"probs_diff_free_max": 2e-6 * (1 + update), "probs_diff_free_mean": 3e-7}
    return {"routing_moved_fraction": 0.1 * update} | (free if update % 2 == 0 else {})


def test_replay_is_compared_over_the_same_updates(tmp_path):
    learner = Learner(measures_mismatch=lambda update: update != 4, routing=routed)
    recorder, learner = record(tmp_path, learner=learner)
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if "probs_diff_free_max" in row] == [0, 2, 4, 6]
    summary = summarise(recorder.totals, recorder.accounting, 1.0, 2)
    # update 4 had no token to measure
    assert summary["routing_compared_updates"] == 3
    assert summary["mismatch_compared_tokens"] == 3 * Figures().mismatch_tokens
    assert summary["mismatch_tokens"] == 6 * Figures().mismatch_tokens
    assert summary["probs_diff_replayed_max"] == Figures().probs_diff_max
    assert summary["probs_diff_replayed_mean"] == pytest.approx(1e-7)
    assert summary["probs_diff_free_max"] == pytest.approx(14e-6)
    assert summary["probs_diff_free_mean"] == pytest.approx(3e-7)
    inputs = [sum(s.rollout.num_tokens - 1 for s in batch.samples) for batch in learner.batches]
    moved = sum(0.1 * update * count for update, count in enumerate(inputs)) / sum(inputs)
    assert summary["routing_moved_fraction"] == pytest.approx(moved)
    back = RunTotals(["student-0"])
    restore_totals(back, json.loads(json.dumps(dump_totals(recorder.totals, 0.0))), 0.0)
    resumed = summarise(back, recorder.accounting, 1.0, 2)
    assert all(resumed[key] == value for key, value in summary.items() if "mismatch" in key)
    assert resumed["routing_compared_updates"] == 3


def test_the_fraction_of_routing_that_moved_weighs_what_was_routed():
    totals = RunTotals()
    for count, moved in ((2, 0.5), (10, 0.1)):
        batch = Batch(0, 0, (make_sample(0, num_tokens=count),))
        totals.add_update(batch, Figures(routing_moved_fraction=moved), 0.0, 1.0)
    # prompts of 3, and the last token is never an input: 4 and 12
    assert totals.routing.moved.value == pytest.approx((4 * 0.5 + 12 * 0.1) / 16)


def test_a_run_without_replay_compares_nothing(tmp_path):
    recorder, _ = record(tmp_path)
    summary = summarise(recorder.totals, recorder.accounting, 1.0, 2)
    assert summary["routing_compared_updates"] == summary["mismatch_compared_tokens"] == 0
    for key in (
        "routing_moved_fraction",
        "probs_diff_free_max",
        "probs_diff_replayed_max",
    ):
        assert summary[key] is None
