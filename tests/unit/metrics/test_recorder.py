"""Reducers, the App. G formulas, rows, sinks, summary and displays."""

import asyncio
import io
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.progress import (
    LivePanel,
    PlainLines,
    duration,
    line,
    make_display,
    panel,
)
from megatron_opd.controller.schedule import Schedule
from megatron_opd.metrics.cache_size import CacheSize, cache_bytes
from megatron_opd.metrics.intervals import BusyTime
from megatron_opd.metrics.persist import dump_totals, restore_totals
from megatron_opd.metrics.recorder import RunRecorder, batch_columns
from megatron_opd.metrics.rewards import RewardStats
from megatron_opd.metrics.sinks import JsonlSink, json_ready, write_json
from megatron_opd.metrics.staleness import StalenessCounts
from megatron_opd.metrics.summary import summarise, versions
from megatron_opd.metrics.throughput import StageTimes, Throughput
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Depths, Histogram, Max, Mean, Sum
from megatron_opd.types import Batch, VersionSpan
from tests.support.fakes import (
    Figures,
    Fleet,
    Learner,
    Publisher,
    Teacher,
    make_prompt,
    make_rollout,
    make_sample,
    prompts,
    run_virtual,
)
from tests.support.recorded_run import record


def test_reducers():
    mean, largest, total, histogram = Mean(), Max(), Sum(), Histogram()
    assert (mean.value, largest.value, total.value, histogram.mean) == (None, None, 0.0, None)
    mean.add(1.0, weight=3)
    mean.add(5.0)
    assert mean.value == 2.0
    for value in (-2.0, -5.0):
        largest.add(value)
        total.add(value)
    assert (largest.value, total.value) == (-2.0, -7.0)
    histogram.add(0, 3)
    histogram.add(2)
    assert (histogram.mean, histogram.max, histogram.as_json()) == (0.5, 2, {"0": 3, "2": 1})
    with pytest.raises(ValueError, match="finite"):
        mean.add(math.nan)


intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda x: (x[0], x[0] + x[1])),
    max_size=12,
)


def covered(spans):
    """The unit cells that integer intervals cover: the obvious oracle."""
    return {cell for start, stop in spans for cell in range(start, stop)}


@settings(deadline=None)
@given(intervals, intervals)
def test_busy_time_is_the_union(first, second):
    busy, other = BusyTime(first), BusyTime(second)
    assert busy.seconds == len(covered(first))
    assert busy.seconds_outside(other) == len(covered(first) - covered(second))
    merged = busy.intervals
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


def test_busy_time_refuses_a_reversed_interval():
    with pytest.raises(ValueError, match=r"2\.0\.\.1\.0"):
        BusyTime().add(2.0, 1.0)


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
    times.publish.add(9.0, 10.0)
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


def test_staleness_counts_tokens_and_partial_rollouts():
    spans = (VersionSpan(2, 0, 3), VersionSpan(4, 3, 4))
    samples = (
        make_sample(0, 5),
        replace(make_sample(1), rollout=make_rollout(make_prompt(1), spans)),
    )
    counts = StalenessCounts()
    counts.add(Batch(5, 5, samples))
    assert counts.tokens.as_json() == {"0": 4, "1": 1, "3": 3}
    assert counts.samples.as_json() == {"0": 1, "3": 1}
    assert counts.partial_rollouts == 1


def test_cache_size():
    sample = make_sample(0, num_tokens=4)
    cache = CacheSize()
    assert cache.bytes_per_token is None
    cache.add(Batch(0, 0, (sample,)))
    # rows alternate between weights (1, 0) and (0.25, 0.75)
    assert cache.distinct_ids_per_token == 1.5
    assert cache.cached_ids_per_token == 2.0
    assert cache_bytes(sample) == 8 * 16 + 4 * (8 + 8 + 4) + 8
    assert cache.bytes_per_token == cache_bytes(sample) / 4


def test_rewards_and_how_much_groups_differ():
    rewards = [1.0, 0.0, 1.0, 1.0, None, 0.0]
    batch = Batch(0, 0, tuple(replace(make_sample(i), reward=r) for i, r in enumerate(rewards)))
    single, paired = RewardStats(), RewardStats(2)
    assert single.mean is paired.group_std is paired.uniform_groups is None
    for stats in (single, paired):
        stats.add(batch)
        assert stats.mean == pytest.approx(3 / 5)
    assert single.group_std is single.uniform_groups is None
    # deviations 1/2, 0 and (of the one reward there is) 0
    assert paired.group_std == pytest.approx(1 / 6)
    assert paired.uniform_groups == pytest.approx(2 / 3)
    columns = batch_columns(batch, 2)
    assert columns["reward_mean"] == pytest.approx(0.6)
    assert columns["reward_uniform_group_fraction"] == pytest.approx(2 / 3)
    totals = RunTotals(group_size=2)
    totals.add_update(batch, Figures(), 0.0, 1.0)
    assert totals.rewards.group_std == paired.group_std


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


def test_an_interruption_between_update_and_publication_keeps_the_row(tmp_path):
    fleet, learner = Fleet(), Learner()
    publisher = Publisher(fleet, learner, lambda version: 1e6 if version == 2 else 0.1)

    async def scenario():
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        clock = asyncio.get_running_loop().time
        recorder = RunRecorder(9, RunTotals(), [sink], clock=clock)
        ports = Ports(prompts(), fleet, Teacher(), learner, publisher, recorder)
        run = asyncio.create_task(Controller(Schedule(9, 3, 1, 16, 16), ports).run())
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


def test_the_first_drop_for_a_reason_is_told(tmp_path, caplog):
    record(tmp_path, drop={4, 6, 9})
    (told,) = (entry.getMessage() for entry in caplog.records)
    assert told.endswith("dropped for nan (teacher-0); more of this kind are only counted")


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path, learner=Learner(measures_mismatch=lambda update: update % 2 == 1))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = events.Scalars("opd/loss")
    assert [(event.step, event.value) for event in losses] == [(k, 0.5) for k in range(7)]
    assert losses[0].wall_time > 1e9
    measured = events.Scalars("opd/probs_diff_max")
    assert [event.step for event in measured] == [1, 3, 5], "what is null is no point"


def test_summary_of_a_run(tmp_path):
    recorder, learner = record(tmp_path, drop={4})
    summary = summarise(recorder.totals, recorder.accounting, wall_s=12.5, max_staleness=2)
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
    recorder = RunRecorder(5, RunTotals(["student-0"]))
    learner = Learner()
    fleet = Fleet()
    ports = Ports(prompts(0), fleet, Teacher(), learner, Publisher(fleet, learner), recorder)
    run_virtual(Controller(Schedule(5, 3, 2, 16, 16), ports).run())
    summary = summarise(recorder.totals, recorder.accounting, 0.1, 2)
    assert summary["overlap"] is None
    assert summary["train_tokens_per_s"] is None
    json.dumps(summary, allow_nan=False)


def test_versions_name_the_engines():
    assert set(versions()) == {"torch", "megatron_core", "sglang"}


def test_json_ready_handles_numpy_and_non_finite_numbers():
    value = {"a": np.float32(0.5), "b": [np.int64(3), math.nan, math.inf], 3: (True, None, "x")}
    assert json_ready(value) == {"a": 0.5, "b": [3, None, None], "3": [True, None, "x"]}


def test_plain_lines_when_there_is_no_terminal(tmp_path):
    text = io.StringIO()
    display = make_display(Console(file=text, width=40))
    assert isinstance(display, PlainLines)
    record(tmp_path, display=display)
    lines = text.getvalue().splitlines()
    assert len(lines) == 7
    assert lines[2].startswith("update 3/7  version 3  loss 0.5000  reverse KL 0.2500")
    assert "permits" in lines[2]
    assert lines[-1].endswith("ETA 0:00")


def test_a_run_without_a_teacher_shows_its_reward(tmp_path):
    shown = RunRecorder(4, RunTotals()).snapshot()
    rewarded = replace(shown, reward_mean=0.25)
    assert "reverse KL -" in line(shown)
    assert "  reward 0.2500  " in line(rewarded)
    assert "  reverse KL 0.5000  " in line(replace(rewarded, reverse_kl_nats=0.5))
    text = io.StringIO()
    Console(file=text, width=120).print(panel(rewarded))
    assert "reward" in text.getvalue()
    assert "nats" not in text.getvalue()


def test_live_panel_on_a_terminal(tmp_path):
    text = io.StringIO()
    display = make_display(Console(file=text, force_terminal=True, width=120))
    assert isinstance(display, LivePanel)
    record(tmp_path, display=display)
    shown = text.getvalue()
    assert "update 7/7" in shown
    assert "reverse KL (nats)" in shown
    assert "permits" in shown


def test_a_line_before_the_first_update():
    recorder = RunRecorder(4, RunTotals())
    recorder.started(0.0, Depths(1, 2, 3, 6, 8))
    text = line(recorder.snapshot())
    assert "loss -" in text
    assert "permits 6/8" in text
    assert text.endswith("ETA -")


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0:00"), (59.6, "1:00"), (3723, "1:02:03")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
