"""The figures at the top of the report."""

from pathlib import Path

from megatron_opd.report.headline import UNKNOWN, headlines_of
from megatron_opd.report.run_data import load_runs
from tests.support.report_runs import simulated, written

SUMMARY = {
    "student_accuracy_before_pct": 40.0,
    "student_accuracy_after_pct": 85.0,
    "teacher_accuracy_pct": 90.0,
    "updates": 12,
    "wall_s": 75.0,
    "train_tokens_per_s": 20.0,
    "learner_idle_ratio": 0.67,
    "staleness_mean_versions": 0.5,
    "staleness_max_versions": 1,
    "staleness_bound_versions": 1,
    "samples_consumed": 48,
    "samples_dropped": {"nan": 2},
    "peak_rss_bytes": 5e9,
}


def cells(*paths: Path) -> dict[str, tuple[str, ...]]:
    found = headlines_of(load_runs(paths))
    return {each.label: tuple(map(str, each.cells)) for each in found}


def test_figures_are_written_with_what_they_are_compared_with(tmp_path: Path):
    found = {label: cell for label, (cell,) in cells(written(tmp_path / "r", 12, SUMMARY)).items()}
    assert found["Accuracy on held-out problems"] == "40.0 % to 85.0 %"
    assert found["Gap to the teacher closed"] == "90 %"
    assert found["Updates"] == "12 of 20"
    assert found["Time"] == "1 min 15 s"
    assert found["Learner idle"] == "67 %"
    assert found["Staleness"] == "0.500 (largest 1, bound 1)"
    assert found["Samples trained on"] == "48 (2 dropped)"
    assert found["Peak memory"] == "5 GB"
    assert found["Reverse KL"] == "0.500 to 0.0417"
    assert found["Weight sync"] == "200 ms (100 ms of it a pause)"
    assert "Overlap" not in found


def test_a_run_without_a_summary_has_what_its_rows_tell(tmp_path: Path):
    found = {label: cell for label, (cell,) in cells(written(tmp_path / "run")).items()}
    assert found["Time"] == "24 s"
    assert found["Learner idle"] == "10 %"
    assert found["Staleness"] == "0.500 (largest 1)"
    assert "Peak memory" not in found


def test_runs_stand_side_by_side(tmp_path: Path):
    found = cells(written(tmp_path / "a", 12, SUMMARY), simulated(tmp_path / "b"))
    assert found["Updates"] == ("12 of 20", "8 of 8")
    assert found["Loss"][1] == UNKNOWN
    assert found["Loss"][0] == "0.500 to 0.0417"


def test_a_student_that_was_better_than_its_teacher_closed_no_gap(tmp_path: Path):
    run = written(tmp_path / "run", 12, {**SUMMARY, "teacher_accuracy_pct": 30.0})
    assert "Gap to the teacher closed" not in cells(run)
