"""What a window between two weight syncs counts: idle time, stale and partial samples."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_opd.metrics.types import Depths, Phase, WeightSyncReport
from megatron_opd.metrics.window import COLUMNS, SyncWindow
from megatron_opd.records.types import Batch, Sample, VersionSpan
from tests.support.fakes import make_prompt, make_rollout, make_sample


def depths(rolling: int) -> Depths:
    return Depths(rolling, 0, 0, 0, 8)


def sample(uid: int, *versions: int) -> Sample:
    spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions))
    return replace(make_sample(uid), rollout=make_rollout(make_prompt(uid), spans))


def report(version: int, paused_from_s: float, resumed_s: float, held_s: float) -> Any:
    phase = Phase("send", paused_from_s, resumed_s)
    return WeightSyncReport(version, (phase,), 9, paused_from_s, resumed_s, learner_held_s=held_s)


def test_a_window_counts_its_own_samples_and_begins_anew():
    window = SyncWindow(group_size=2, version=0, now_s=0.0)
    window.moved(depths(3), 1.0)  # nothing was sampled before
    window.trained(Batch(0, 0, (sample(0, 0, 0), sample(1, 0, 0))), 4.0, 6.0)
    first = window.synced(report(1, 6.5, 7.0, 1.0), 8.0)
    assert tuple(first) == COLUMNS
    assert first == {
        "window_updates": 1,
        "window_stale_samples": 0,
        "window_stale_prompts": 0,
        "window_partial_samples": 0,
        "window_partial_ratio": 0.0,
        "window_partial_span_max": 0,
        "window_learner_idle_ratio": pytest.approx(5 / 8),
        "window_sampler_idle_ratio": pytest.approx(1.5 / 8),
    }
    window.moved(depths(0), 10.0)
    window.trained(Batch(1, 1, (sample(2, 0, 1), sample(3, 1, 1))), 9.0, 12.0)
    window.moved(depths(2), 13.0)
    window.trained(Batch(2, 2, (sample(4, 0, 0, 0), sample(5, 0, 0, 1))), 13.0, 16.0)
    window.moved(depths(0), 17.0)
    second = window.synced(report(3, 17.5, 18.0, 2.0), 18.0)
    assert second["window_updates"] == 2
    assert (second["window_stale_samples"], second["window_stale_prompts"]) == (3, 2)
    assert (second["window_partial_samples"], second["window_partial_ratio"]) == (2, 0.5)
    assert second["window_partial_span_max"] == 1
    assert second["window_learner_idle_ratio"] == pytest.approx(2 / 10)
    assert second["window_sampler_idle_ratio"] == pytest.approx(4 / 10)
    assert (window.stale_samples, window.stale_prompts) == (3, 2)


def test_a_window_without_an_update_or_time_has_no_ratios():
    window = SyncWindow(1, 4, 5.0)
    found = window.synced(report(4, 0.0, 0.0, 0.0), 5.0)
    assert found["window_partial_ratio"] is found["window_learner_idle_ratio"] is None
