"""The summary of a run."""

import json

import pytest

from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.sinks import write_json
from megatron_opd.metrics.summary import summarise, versions
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import Fleet, Learner, Teacher, WeightSyncer, prompts
from tests.support.recorded_run import record
from tests.support.schedules import planned


def test_summary_of_a_run(tmp_path):
    recorder, learner = record(tmp_path, drop={4})
    summary = summarise(recorder.totals, recorder.accounting, wall_s=12.5, bound=2)
    assert summary["updates"] == summary["version"] == 7
    assert summary["samples_consumed"] == 21
    assert summary["samples_admitted"] == 22
    assert summary["samples_dropped"] == {"nan": 1}
    assert summary["samples_in_flight"] == summary["aborted_requests"] == 0
    assert summary["staleness_max_versions"] <= summary["staleness_bound_versions"] == 2
    assert 0 < summary["overlap"] <= 3
    assert 0 <= summary["learner_idle_ratio"] <= 1
    assert 0 <= summary["fleet_idle_ratio"] <= 1
    assert summary["publish_s_mean"] == pytest.approx(0.2)
    assert summary["probs_diff_max"] == 1e-6
    assert summary["peak_rss_bytes"] > 2**20
    tokens = sum(batch.num_response_tokens for batch in learner.batches[5:])
    assert summary["train_tokens_per_s"] == pytest.approx(
        tokens / (recorder.totals.throughput._done_s[-1] - recorder.totals.throughput._done_s[4])
    )
    write_json(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text())["wall_s"] == 12.5
    assert [p.name for p in tmp_path.glob(".summary*")] == []


def test_summary_of_a_run_that_did_nothing():
    recorder = RunRecorder(RunTotals(["student-0"]))
    learner = Learner()
    fleet = Fleet()
    ports = Ports(prompts(0), fleet, Teacher(), learner, WeightSyncer(fleet, learner), recorder)
    run_virtual(Controller(planned(5, 3, 2, 16, 16), ports).run())
    summary = summarise(recorder.totals, recorder.accounting, 0.1, 2)
    assert summary["overlap"] is None
    assert summary["train_tokens_per_s"] is None
    json.dumps(summary, allow_nan=False)


def test_versions_name_the_engines():
    assert set(versions()) == {"torch", "megatron_core", "sglang"}
