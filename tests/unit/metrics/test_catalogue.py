"""The catalogue and what runs write hold the same columns."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_opd.config.curriculum import PassRateCurriculum
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.evaluation.progress import Evaluated
from megatron_opd.evaluation.reports import EvaluationReport, TurnMeans
from megatron_opd.fleet.bill import billed
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.metrics.catalogue import BY_GROUP, GROUP_OF, METRICS, metric_of, tag_of
from megatron_opd.metrics.hint_leak import LeakFigures
from megatron_opd.metrics.metric import Range
from megatron_opd.metrics.opd_health import HealthFigures
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.teacher_health import TeacherWatch
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Depths, Phase, WeightSyncReport
from megatron_opd.records.sample_figures import AlignedScores
from megatron_opd.records.types import Batch, TurnFigures
from megatron_opd.sites.figures import SiteFigures, SitesNow, columns
from megatron_opd.transport.messages import UpdateMetrics
from tests.support.config_files import minimal
from tests.support.fakes import make_sample
from tests.support.paths import ROOT

AXES = {"update", "time_s", "unix_time_s"}  # of every row, of either file
REPORT = EvaluationReport(50.0, 25.0, 2, 1, 3.5, 0.0, 0.5, {}, turns=TurnMeans(2.5, 1.0, 0.5))
EVALUATION_ROW = set(Evaluated(2, "heldout", 1, 0.5, 3.0, 1e9, REPORT).row())
"""What the evaluation of one set reports."""


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, update, row):
        self.rows.append(dict(row))

    def evaluated(self, row):
        self.rows.append(dict(row))

    def close(self):
        pass


def whole_metrics() -> UpdateMetrics:
    """Every figure that an estimator can report, all at once."""
    return UpdateMetrics(**{field.name: 1 for field in msgspec.structs.fields(UpdateMetrics)})


def whole_row() -> dict[str, Any]:
    """The row of an update with every feature on: teachers, rewards, curriculum, turns, sites."""
    sink = Rows()
    watch = TeacherWatch({"teacher": 16, "maths": 16}, alarm=False, stop_after=0)
    totals = RunTotals(group_size=2, credit="turn")
    curriculum = CurriculumSource(Nothing(), 1, PassRateCurriculum(), seed=0)
    sites = partial(columns, {"near": SiteFigures()}, SitesNow(1, 0))
    more = {
        "probes": (Health(), Hints()),
        "more_columns": lambda: curriculum.columns() | sites() | paid(),
    }
    recorder = RunRecorder(totals, [sink], teacher_watch=watch, **more)
    samples = []
    for uid in range(2):
        sample = make_sample(uid)
        prompt = replace(sample.rollout.prompt, teacher=("teacher", "maths")[uid])
        rollout = replace(sample.rollout, prompt=prompt, turns=(TurnFigures(1.0, 1.0),))
        aligned = AlignedScores(np.ones(3, np.uint8), np.zeros(2, np.float32))
        scored = replace(sample, rollout=rollout, teacher_version=0, aligned=aligned)
        samples.append(replace(scored, reward=float(uid)))
    batch = Batch(0, 0, tuple(samples))
    recorder.trained(batch, whole_metrics(), 0.0, 1.0)
    phases = (Phase("offload", 1.0, 2.0), Phase("send", 2.0, 3.0))
    report = WeightSyncReport(1, phases, 9, 1.0, 3.0, servers=("http://a",), release_s=0.5)
    report = replace(report, teachers=(report,))
    recorder.weights_synced(batch, report, Depths(0, 0, 0, 0, 0))
    (row,) = sink.rows
    return row


def paid() -> dict[str, float]:
    """What a teacher costs that has a price."""
    section = {"model": "m", "urls": ["http://127.0.0.1:1"], "api": "sglang"}
    priced = section | {"cost_per_million_tokens": 1.0}
    config = minimal(support={"type": "path"}, teacher=priced)
    assert config.teacher is not None
    return billed(config, {"teacher": make_fleet(config.teacher, config.teacher.urls)})


class Nothing:
    """Prompts that nobody takes."""

    def at(self, cursor):
        return self


class Health:
    def start(self, batch):
        pass

    def columns(self):
        figures = HealthFigures(*[1] * 9)
        return figures.columns() | {"health_update": 0, "health_s": 1.0}

    def stop(self):
        pass


class Hints(Health):
    def columns(self):
        return LeakFigures(*[1] * 7).columns() | {"leak_update": 0, "leak_s": 1.0}


def of_updates() -> set[str]:
    return {column for column, group in GROUP_OF.items() if group != "eval"}


def test_every_column_of_a_row_is_in_the_catalogue_and_the_other_way_round():
    found = {column.partition("/")[0] for column in whole_row()}
    assert found - of_updates() == set(), "describe them in metrics/dictionary/"
    assert of_updates() - found == set(), "no run writes them"


def test_every_figure_of_an_evaluated_set_is_in_the_catalogue():
    assert GROUP_OF.keys() - of_updates() | AXES == EVALUATION_ROW


def test_no_column_is_described_twice():
    assert sum(len(part) for parts in BY_GROUP.values() for part in parts) == len(METRICS)


@pytest.mark.parametrize("peer", ["slime", "verl"])
def test_no_alias_stands_for_two_columns(peer: str):
    names = [metric.aliases[peer] for metric in METRICS.values() if peer in metric.aliases]
    assert len(names) == len(set(names)) > 8
    assert all(re.fullmatch(r"[a-z0-9_-]+(/[a-z0-9_-]+)+", name) for name in names)


@pytest.mark.parametrize("names", ["opd", "slime", "verl"])
def test_no_two_columns_are_shown_under_one_name(names: Any):
    tags = [tag_of(column, names) for column in METRICS]
    assert len(tags) == len(set(tags))


def test_entries_are_complete():
    for column, metric in METRICS.items():
        assert metric.text.endswith((".", ")")), column
        assert len(metric.text) > 15, column
        assert set(metric.aliases) <= {"slime", "verl"}
        assert metric.aliases or not metric.differs, column
        assert metric.healthy is None or metric.action, f"{column}: what to do outside?"
        units = {"_s": "s", "_nats": "nats", "_bytes": "bytes", "_pct": "%"}
        for ending, unit in units.items():
            if column.endswith(ending) and column not in {
                "stderr_pct",
                "pass_at_k_stderr_pct",
                "tokens_per_s",
            }:
                assert metric.unit.startswith(unit), column


def test_keys_that_the_catalogue_names_are_there():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", page))
    sections = {key.partition(".")[0] for key in keys} - {"metrics"}
    named = {
        key
        for metric in METRICS.values()
        for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", f"{metric.text} {metric.action}")
        if key.partition(".")[0] in sections and not key.endswith((".md", ".json", ".jsonl"))
    }
    assert len(named) > 20
    assert named - keys == set()


@pytest.mark.parametrize(
    ("column", "names", "tag"),
    [
        ("loss", "opd", "train/loss"),
        ("loss", "verl", "actor/loss"),
        ("loss", "slime", "train/loss"),
        ("publish_s", "slime", "perf/update_weights_time"),
        ("pause_s", "slime", "weight_sync/pause_s"),
        ("teacher_score_std_nats/maths", "verl", "teacher/teacher_score_std_nats/maths"),
        ("my_own", "verl", "my_own"),
    ],
)
def test_tags(column: str, names: Any, tag: str):
    assert tag_of(column, names) == tag


def test_a_column_of_one_teacher_is_described_as_that_of_all():
    assert metric_of("teacher_score_std_nats/maths") is METRICS["teacher_score_std_nats"]
    assert metric_of("my_own") is None


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (Range(0, 0.2), (0, 0.2), (-0.1, 0.21, np.nan), "0 to 0.2"),
        (Range(0.5, None), (0.5, 7), (0.49,), ">= 0.5"),
        (Range(None, 0), (-3, 0), (0.1,), "<= 0"),
        (Range(1, 1), (1,), (0, 2), "1"),
    ],
)
def test_ranges(bounds: Range, inside, outside, text: str):
    assert all(bounds.holds(value) for value in inside)
    assert not any(bounds.holds(value) for value in outside)
    assert str(bounds) == text


def test_a_metric_without_an_alias_keeps_its_name():
    assert METRICS["cpu_s"].aliases == {}
    tags = [tag_of("cpu_s", names) for names in ("opd", "slime", "verl")]
    assert tags == ["perf/cpu_s"] * 3
