"""Figures from rows are those of summary.json."""

import json
import math
from pathlib import Path

import pytest

from megatron_opd.metrics.summary import summarise
from megatron_opd.report.figures import ends, figures_of_rows, run_figures
from megatron_opd.report.run_data import load_runs
from megatron_opd.report.series import table_of
from tests.support.fakes import Learner
from tests.support.recorded_run import record
from tests.support.report_runs import simulated, written

SAME = (
    "updates",
    "samples_consumed",
    "staleness_mean_versions",
    "staleness_max_versions",
    "partial_rollouts",
    "train_s_mean",
    "publish_s_mean",
    "pause_s_mean",
    "train_tokens_per_s",
)


def of_rows(path: Path) -> dict[str, float]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return figures_of_rows(table_of(map(json.loads, lines)))


def test_figures_of_a_simulated_run_are_those_of_its_summary(tmp_path: Path):
    run = simulated(tmp_path / "run", updates=12)
    summary = json.loads((run / "summary.json").read_text())
    found = of_rows(run)
    assert {name: found[name] for name in SAME} == {
        name: pytest.approx(summary[name], rel=1e-9) for name in SAME
    }


def test_figures_of_a_recorded_run_are_those_of_its_summary(tmp_path: Path):
    learner = Learner(measures_mismatch=lambda update: update % 3 > 0)
    recorder, _ = record(tmp_path, updates=9, drop={4}, learner=learner)
    summary = summarise(recorder.totals, recorder.accounting, 1.0, 2)
    found = of_rows(tmp_path)
    also = ("probs_diff_max", "probs_diff_mean", "ratio_p99", "ratio_max", "updates_without_signal")
    cache = ("distinct_ids_per_token", "cache_bytes_per_token")
    assert {name: found[name] for name in (*SAME, *also, *cache)} == {
        name: pytest.approx(summary[name], rel=1e-9) for name in (*SAME, *also, *cache)
    }
    assert found["dropped_samples"] == sum(summary["samples_dropped"].values()) == 1


def test_what_a_summary_says_is_shown_and_what_it_lacks_comes_from_rows(tmp_path: Path):
    summary = {"updates": 99, "probs_diff_mean": None, "samples_dropped": {"nan": 2, "late": 3}}
    (run,) = load_runs([written(tmp_path / "run", summary=summary)])
    found = run_figures(run)
    assert found["updates"] == 99
    assert found["probs_diff_mean"] == pytest.approx(1e-4)
    assert found["dropped_samples"] == 5


def test_idle_ratios_are_weighted_by_the_length_of_their_windows():
    rows = [
        {"update": 0, "time_s": 1.0, "window_learner_idle_ratio": 0.0},
        {"update": 1, "time_s": 2.0, "window_learner_idle_ratio": None},
        {"update": 2, "time_s": 4.0, "window_learner_idle_ratio": 1.0},
    ]
    assert figures_of_rows(table_of(rows))["window_learner_idle"] == pytest.approx(0.75)


def test_begin_and_end_are_means_of_a_twentieth():
    table = table_of([{"update": i, "loss": float(i)} for i in range(40)])
    assert ends(table, "loss") == (0.5, 38.5)
    assert all(map(math.isnan, ends(table, "reward_mean")))


def test_a_run_without_rows_has_no_figures_but_a_count():
    assert figures_of_rows(table_of([])) == {"updates": 0.0}
