"""Rows: what a run writes after each update, and what it leaves out."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.evaluation.progress import Evaluated
from megatron_opd.evaluation.reports import EvaluationReport
from megatron_opd.metrics.observers import Observers, RunObserver
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.sinks import JsonlSink
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.metrics.types import Accounting, Depths, Phase, WeightSyncReport
from megatron_opd.records.types import Batch
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.work import ServerWork
from tests.support.fakes import Figures, Fleet, Learner, Teacher, WeightSyncer, make_sample, prompts
from tests.support.recorded_run import record
from tests.support.schedules import planned


def test_figures_without_a_meaning_become_no_column(tmp_path):
    record(tmp_path, learner=Learner(reverse_kl_nats=None))
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 7
    for row in rows:
        assert "reverse_kl_nats" not in row
        assert row["loss"] == 0.5


def test_an_update_that_measured_no_mismatch_says_null_and_leaves_the_summary_alone(tmp_path):
    recorder, _ = record(tmp_path, learner=Learner(measures_mismatch=lambda update: update % 3 > 0))
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for key, value in (("probs_diff_max", 1e-6), ("probs_diff_mean", 1e-7)):
        nothing = None
        assert [row[key] for row in rows] == [nothing, value, value] * 2 + [nothing]
    summary = summarise(recorder.totals, recorder.accounting, 1.0, 2)
    assert summary["probs_diff_max"] == 1e-6
    assert summary["probs_diff_mean"] == pytest.approx(1e-7)
    assert summary["mismatch_tokens"] == 4 * Figures().mismatch_tokens


def test_a_run_that_never_measured_a_mismatch_has_none(tmp_path):
    recorder, _ = record(tmp_path, learner=Learner(measures_mismatch=lambda update: False))
    summary = summarise(recorder.totals, recorder.accounting, 1.0, 2)
    assert summary["probs_diff_max"] is None
    assert summary["probs_diff_mean"] is None


def test_a_run_writes_a_row_per_update(tmp_path):
    _, learner = record(tmp_path, drop={4})
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(7))
    assert [row["version"] for row in rows] == list(range(7))
    for row, batch in zip(rows, learner.batches, strict=True):
        assert row["num_response_tokens"] == batch.num_response_tokens
        assert row["staleness_max_versions"] <= 2
        assert row["loss"] == 0.5
        assert row["grad_norm"] == 1.0
        assert row["publish_s"] == pytest.approx(0.2)
        assert row["tokens_per_s"] > 0
    assert rows[-1]["dropped_samples"] == 1
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)


def test_an_interruption_between_update_and_weight_sync_keeps_the_row(tmp_path):
    fleet, learner = Fleet(), Learner()
    weight_sync = WeightSyncer(fleet, learner, lambda version: 1e6 if version == 2 else 0.1)

    async def scenario():
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        clock = asyncio.get_running_loop().time
        recorder = RunRecorder(RunTotals(), [sink], clock=clock)
        ports = Ports(prompts(), fleet, Teacher(), learner, weight_sync, recorder)
        run = asyncio.create_task(Controller(planned(9, 3, 1, 16, 16), ports).run())
        await asyncio.sleep(50)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        return recorder

    recorder = run_virtual(scenario())
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["update"], second["update"]) == (0, 1)
    assert "publish_s" in first
    assert "publish_s" not in second
    summary = summarise(recorder.totals, recorder.accounting, 50.0, 1)
    assert summary["interrupted"]
    assert (summary["updates"], summary["version"]) == (2, 1)
    in_flight = summary["samples_in_flight"]
    assert summary["samples_admitted"] == summary["samples_consumed"] + in_flight


def test_rows_of_updates_beside_weight_syncs_hold_their_own_figures(tmp_path):
    """Update u + 1 is reported before the weight sync of u; one is cut off with both unfinished."""
    rows = RunRecorder(totals := RunTotals(), [JsonlSink(tmp_path / "metrics.jsonl")])

    def batch(update: int) -> Batch:
        return Batch(update, update, (make_sample(update, update, num_tokens=update + 4),))

    def trained(update: int) -> None:
        began_s = 10.0 * update
        rows.trained(batch(update), Figures(loss=update / 2), began_s, began_s + update + 1)

    def synced(update: int) -> None:
        begun_s, size = 10.0 * update + 5, 1000 + update
        phases = (Phase("send", begun_s, begun_s + 7),)
        held_s = update / 4
        report = WeightSyncReport(update + 1, phases, size, begun_s, begun_s + 1, 1, held_s)
        rows.weights_synced(batch(update), report, Depths(0, 0, 0, 0, 0))

    trained(0)
    for update in (1, 2, 3):
        trained(update)
        synced(update - 1)
    trained(4)
    rows.ended(Accounting(5, 3, 5, 5, {}, 0, True), 60.0)
    found = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in found] == [0, 1, 2, 3, 4]
    for update, row in enumerate(found):
        figures = (row["loss"], row["train_s"], row["num_response_tokens"])
        assert figures == (update / 2, update + 1, update + 4)
        sync = (row.get("publish_bytes"), row.get("learner_held_s"))
        assert sync == ((1000 + update, update / 4) if update < 3 else (None, None))
    summary = summarise(totals, rows.accounting, 60.0, 1)
    assert summary["learner_held_s_mean"] == 0.25


@pytest.mark.parametrize("turns", [True, False])
def test_seconds_in_which_memory_changes_hands(tmp_path: Path, turns: bool):
    recorder = RunRecorder(totals := RunTotals(), [JsonlSink(tmp_path / "metrics.jsonl")])
    batch = Batch(0, 0, (make_sample(0),))
    recorder.trained(batch, Figures(), 0.0, 1.0)
    names = ("offload", "resume weights", "send", "resume cache", "continue")
    phases = tuple(Phase(name, 2.0**i, 2.0 ** (i + 1)) for i, name in enumerate(names))
    report = WeightSyncReport(1, phases, 9, 2.0, 32.0, release_s=0.25 if turns else None)
    recorder.weights_synced(batch, report, Depths(0, 0, 0, 0, 0))
    recorder.ended(Accounting(1, 1, 1, 1, {}, 0, False), 60.0)
    (row,) = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = [row.get(key) for key in ("memory_release_s", "memory_resume_s")]
    assert found == ([0.25, 1 + 2 + 8] if turns else [None, None])
    assert ("memory_release_s" in row) == turns
    summary = summarise(totals, recorder.accounting, 60.0, 1)
    means = [summary[f"memory_{part}_s_mean"] for part in ("release", "resume")]
    assert means == ([0.25, 11] if turns else [None, None])


def test_a_look_that_comes_after_the_end_is_not_drawn(tmp_path: Path):
    """Before: a server that answered late wrote into a closed file, which failed the run."""
    timeline = Timeline(TraceWriter(tmp_path / "trace.json", 0.0), ["a"])
    timeline.worked("a", ServerWork(), 1.0, teaches=False)
    timeline.used({"controller": 1.0}, 2, 1.0)
    timeline.ended(Accounting(1, 1, 1, 1, {}, 0, False), 60.0)
    timeline.worked("a", ServerWork(), 61.0, teaches=False)
    timeline.used({"controller": 2.0}, 2, 61.0)
    timeline.close()
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())]
    assert names.count("work") == names.count("CPU seconds") == 1


def test_evaluations_are_drawn_from_the_first_update_until_after_the_last(tmp_path: Path):
    trace, now_s = tmp_path / "trace.json", [100.0]
    timeline = Timeline(TraceWriter(trace, 100.0), ["a"], lambda: now_s[0])

    def evaluated(update: int, at_s: float, span: tuple[int, int]) -> None:
        now_s[0] = at_s
        report = EvaluationReport(50.0, 1.0, 8, 4, 3.5, 0.0, 0.5, {})
        report = replace(report, version_min=span[0], version_max=span[1])
        timeline.evaluated(Evaluated(update, "easy", 2, 5.0, at_s, at_s, report).row())

    evaluated(0, 101.0, (0, 0))  # of a time in which nothing was drawn yet
    evaluated(4, 110.0, (4, 6))
    text = trace.read_text()
    assert "easy after 4 updates" in text, "who watches the run sees it at once"
    timeline.ended(Accounting(1, 1, 1, 1, {}, 0, False), 60.0)
    evaluated(8, 118.0, (8, 8))
    timeline.close()
    spans = [each for each in json.loads(trace.read_text()) if each["ph"] == "X"]
    assert [(each["name"], each["ts"], each["dur"]) for each in spans] == [
        ("easy after 4 updates", 5_000_000, 5_000_000),
        ("easy after 8 updates", 13_000_000, 5_000_000),
    ]
    assert spans[0]["args"] == {
        **{"set": "easy", "update": 4, "version_min": 4, "version_max": 6, "lag_steps": 2},
        **{"problems": 8, "samples": 4, "accuracy_pct": 50.0, "mean_response_tokens": 3.5},
    }


def test_the_first_drop_for_a_reason_is_told(tmp_path, caplog):
    record(tmp_path, drop={4, 6, 9})
    (told,) = (entry.getMessage() for entry in caplog.records)
    assert told.endswith("dropped for nan (teacher-0); more of this kind are only counted")


def test_evaluations_are_rows_of_their_own_also_when_the_updates_are_over(tmp_path: Path):
    live: list[int] = []
    recorder = RunRecorder(RunTotals(), [JsonlSink(tmp_path / "metrics.jsonl")])

    class Rows(RunObserver):
        def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
            assert (tmp_path / "metrics.jsonl").read_text()
            live.append(report.version)

    observers = Observers([recorder, Rows()])
    assert not (tmp_path / "evaluations.jsonl").exists(), "there was none"
    batch = Batch(0, 0, (make_sample(0),))
    observers.trained(batch, Figures(), 0.0, 1.0)
    assert live == []
    report = WeightSyncReport(1, (Phase("send", 2.0, 3.0),), 9, 2.0, 3.0)
    observers.weights_synced(batch, report, Depths(0, 0, 0, 0, 0))
    assert live == [1]
    rows = [
        {"update": n, "set": "easy", "accuracy_pct": 25.0 * n, "pass_at_k": {"4": 75.0 + n}}
        for n in (1, 2)
    ]
    observers.evaluated(rows[0])
    observers.ended(Accounting(1, 1, 1, 1, {}, 0, False), 60.0)
    observers.evaluated(rows[1])
    observers.close()
    observers.close()
    found = [json.loads(text) for text in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert found == rows
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
