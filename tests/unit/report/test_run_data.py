"""Everything of a run, as one record."""

import json
from pathlib import Path

import pytest

from megatron_opd.report.run_data import load_runs, names_of
from megatron_opd.report.run_files import NotARun
from tests.support.report_runs import simulated, written


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("/r/a",), ("a",)),
        (("/r/a", "/r/b"), ("a", "b")),
        (("/r/x/run", "/r/y/run", "/r/y/b"), ("x/run", "y/run", "y/b")),
    ],
)
def test_names_are_as_short_as_they_can_be(paths, names):
    assert names_of([Path(path) for path in paths]) == names


def test_a_simulated_run_is_loaded_whole(tmp_path: Path):
    (run,) = load_runs([simulated(tmp_path / "run")])
    assert (run.name, run.state.state, run.simulated) == ("run", "finished", True)
    assert len(run.table) == 8
    assert [lane.stage for lane in run.timeline.lanes] == [
        *("student", "student", "teacher", "learner", "weight sync")
    ]
    assert run.timeline.busy_share("learner") > 0.1
    assert sum(each.rollouts for each in run.servers) == 32
    assert run.setting("student.servers") == "2"
    assert run.setting("student.wings") is None
    assert run.damaged == 0


def test_the_later_evaluation_of_an_update_and_set_counts(tmp_path: Path):
    run = written(tmp_path / "run")
    rows = [
        {"update": 5, "set": "a", "accuracy_pct": 1.0},
        {"update": 5, "set": "b", "accuracy_pct": 2.0},
        {"update": 5, "set": "a", "accuracy_pct": 3.0},
    ]
    (run / "evaluations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (loaded,) = load_runs([run])
    assert [row["accuracy_pct"] for row in loaded.evaluations] == [3.0, 2.0]


def test_a_run_is_named_once(tmp_path: Path):
    run = written(tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(NotARun, match="is given twice"):
        load_runs([run, tmp_path / "link"])


def test_a_run_that_has_done_nothing_yet_is_refused(tmp_path: Path):
    with pytest.raises(NotARun, match="no update yet"):
        load_runs([written(tmp_path / "run", 0)])
    (failed,) = load_runs([written(tmp_path / "failed", 0, {"status": "failed", "cause": "x"})])
    assert failed.state.why == "x"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    run = written(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(NotARun, match=r"metrics\.jsonl cannot be read: Is a directory"):
        load_runs([run])
