"""Evaluations as tracks of points, by set."""

from dataclasses import replace
from pathlib import Path

from megatron_opd.report.accuracy import HELD_OUT, tracks_of
from megatron_opd.report.run_data import RunData, load_runs
from tests.support.report_runs import written

REPORT = {"accuracy_pct": 40.0, "stderr_pct": 2.0, "problems": 64, "samples": 2}


def load(path: Path, evaluations=()) -> RunData:
    (run,) = load_runs([path])
    return replace(run, evaluations=tuple(evaluations))


def test_rows_of_a_set_are_in_the_order_of_their_updates(tmp_path: Path):
    rows = [
        {
            "update": 20,
            "time_s": 40.0,
            "set": "a",
            "accuracy_pct": 60.0,
            "pass_at_k": {"1": 60.0, "4": 80.0},
        },
        {"update": 10, "time_s": 20.0, "set": "a", "accuracy_pct": 50.0, "lag_steps": None},
        {"update": 10, "time_s": 21.0, "set": "b", "accuracy_pct": 5.0},
    ]
    found = tracks_of(load(written(tmp_path / "run"), rows))
    assert found["a"] == {
        "update": [10.0, 20.0],
        "time": [20.0, 40.0],
        "accuracy_pct": [50.0, 60.0],
        "pass_at_k 4": [None, 80.0],
    }
    assert found["b"]["accuracy_pct"] == [5.0]


def test_sets_whose_answers_are_trajectories_show_their_turns_and_rewards(tmp_path: Path):
    head = {"update": 10, "time_s": 20.0, "accuracy_pct": 50.0, "mean_reward": 0.5}
    turns = {"mean_turns": 2.5, "mean_tool_calls": 1.0, "mean_call_errors": 0.25}
    rows = [{**head, "set": "played", **turns}, {**head, "set": "answered"}]
    found = tracks_of(load(written(tmp_path / "run"), rows))
    assert found["played"].keys() - found["answered"].keys() == {"mean_reward", *turns}
    assert [found["played"][key] for key in turns] == [[2.5], [1.0], [0.25]]


def test_a_run_evaluated_at_its_ends_has_two_points(tmp_path: Path):
    reports = {"student before": REPORT, "teacher": REPORT}
    reports["student after"] = {**REPORT, "accuracy_pct": 90.0}
    found = tracks_of(load(written(tmp_path / "run", 12, {"evaluations": reports})))
    assert found[HELD_OUT]["accuracy_pct"] == [40.0, 90.0]
    assert found[HELD_OUT]["update"] == [0.0, 12.0]
    assert found[HELD_OUT]["time"] == [0.0, 24.0]
    assert found["teacher"]["accuracy_pct"] == [40.0, 40.0]


def test_teachers_are_shown_on_each_of_several_sets(tmp_path: Path):
    rows = [{"update": 0, "time_s": 0.0, "set": "a", "accuracy_pct": 40.0}]
    reports = {
        name: {"accuracy_pct": value}
        for name, value in (
            *(("student before on a", 40.0), ("teacher on a", 97.0), ("teacher on b", 98.0)),
            ("teacher maths on a", 99.0),
        )
    }
    found = tracks_of(load(written(tmp_path / "run", 12, {"evaluations": reports}), rows))
    shown = {name: track["accuracy_pct"] for name, track in found.items()}
    assert shown == {
        **{"a": [40.0], "teacher on a": [97.0] * 2, "teacher on b": [98.0] * 2},
        "teacher maths on a": [99.0] * 2,
    }


def test_a_run_without_evaluations_has_no_track(tmp_path: Path):
    run = written(tmp_path / "run", 12, {"evaluations": {"student after": 7}})
    assert tracks_of(load(run)) == {}
