"""What a checkpoint keeps of evaluations, and what is best among them."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from megatron_opd.evaluation.progress import (
    Evaluated,
    EvaluationProgress,
    best_of,
    progress_from,
    without_gain,
)
from megatron_opd.evaluation.reports import EvaluationReport, TurnMeans


def evaluated(update: int, accuracy: float, name: str = "easy", **passes: float) -> Evaluated:
    by_k = {1: accuracy} | {int(k.removeprefix("at_")): value for k, value in passes.items()}
    report = EvaluationReport(
        accuracy,
        stderr_pct=math.nan,
        problems=1,
        samples=4,
        mean_response_tokens=3.5,
        truncated_pct=0.0,
        mean_reward=accuracy / 100,
        verifier_failures={},
        pass_at_k=by_k,
        pass_at_k_stderr_pct=dict.fromkeys(by_k, math.nan),
        version_min=update,
        version_max=update + 2,
    )
    return Evaluated(update, name, 3, 1.5, 20.0, 1e9, report)


def some_progress() -> EvaluationProgress:
    row = evaluated(10, 50.0, at_4=75.0)
    return EvaluationProgress((row,), (20,), 2, 1, {"teacher": {"easy": row.report}})


def test_progress_survives_a_checkpoint() -> None:
    kept = json.loads(json.dumps(some_progress().as_json(), allow_nan=False))
    again = progress_from(kept)
    assert again.as_json() == kept
    (row,) = again.rows
    assert math.isnan(row.report.stderr_pct)
    assert row.report.pass_at_k == {1: 50.0, 4: 75.0}
    assert (again.pending, again.skipped, again.failed) == ((20,), 2, 1)


def test_a_row_names_everything_that_readers_know() -> None:
    row = evaluated(10, 50.0, at_4=75.0).row()
    assert row["pass_at_k"] == {"1": 50.0, "4": 75.0}
    assert {key: row[key] for key in ("update", "set", "version_min", "version_max")} == {
        "update": 10,
        "set": "easy",
        "version_min": 10,
        "version_max": 12,
    }
    assert (row["lag_steps"], row["seconds"], row["time_s"]) == (3, 1.5, 20.0)
    assert {"accuracy_pct", "stderr_pct", "problems", "samples", "unix_time_s"} <= set(row)
    assert {"mean_response_tokens", "truncated_pct"} <= set(row)


def test_rows_of_trajectories_have_figures_of_their_turns_and_others_none() -> None:
    plain = evaluated(10, 50.0)
    report = replace(plain.report, turns=TurnMeans(2.5, 1.5, 0.25))
    played = replace(plain, report=report)
    row = played.row()
    figures = {"mean_turns": 2.5, "mean_tool_calls": 1.5, "mean_call_errors": 0.25}
    assert row == plain.row() | figures
    progress = EvaluationProgress((played, plain), teachers={"teacher": {"easy": report}})
    again = progress_from(json.loads(json.dumps(progress.as_json())))
    assert again.as_json() == progress.as_json()
    assert [each.report.turns for each in again.rows] == [report.turns, None]
    assert again.teachers["teacher"]["easy"].turns == report.turns
    for key in figures:
        for damaged in ({**row, key: "1"}, {k: v for k, v in row.items() if k != key}):
            with pytest.raises(ValueError, match=r".+"):
                progress_from(progress.as_json() | {"rows": [damaged]})


def changed(path: str, value: Any) -> dict[str, Any]:
    kept: Any = json.loads(json.dumps(some_progress().as_json()))
    *parents, last = path.split(".")
    node = kept
    for part in parents:
        node = node[int(part)] if part.isdecimal() else node[part]
    if value is KeyError:
        del node[last]
    else:
        node[last] = value
    return kept


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rows", 7),
        ("rows", [[]]),
        ("rows.0.update", -1),
        ("rows.0.update", True),
        ("rows.0.lag_steps", 0.5),
        ("rows.0.set", None),
        ("rows.0.seconds", "1"),
        ("rows.0.time_s", float("inf")),
        ("rows.0.accuracy_pct", "high"),
        ("rows.0.accuracy_pct", KeyError),
        ("rows.0.stderr_pct", "0"),
        ("rows.0.pass_at_k", {"one": 1.0}),
        ("rows.0.pass_at_k", {"1": 10**400}),
        ("rows.0.stderr_pct", 10**400),
        ("rows.0.pass_at_k", [1.0]),
        ("pending", [0.5]),
        ("pending", None),
        ("skipped", -1),
        ("failed", KeyError),
        ("teachers", []),
        ("teachers.teacher", 3),
    ],
)
def test_a_damaged_checkpoint_is_refused(path: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        progress_from(changed(path, value))


def test_the_best_is_the_largest_and_the_earliest_of_equals() -> None:
    rows = [evaluated(20, 60, at_4=70), evaluated(0, 60, at_4=90), evaluated(10, 50, at_4=90)]
    best = best_of(rows, "accuracy")
    assert best is not None
    assert best.update == 0
    assert best_of(rows, "pass@4") == rows[1]
    assert best_of(rows, "pass@8") is None
    assert best_of([], "accuracy") is None


@pytest.mark.parametrize(
    ("figures", "min_delta", "count"),
    [
        ((), 0.0, 0),
        ((50,), 0.0, 0),
        ((50, 50), 0.0, 1),
        ((50, 51), 0.0, 0),
        ((50, 51), 1.0, 1),
        ((50, 51, 52), 1.0, 0),  # against the last gain, not against the one before
        ((50, 60, 55, 58), 0.0, 2),
        ((50, 60, 55, 61), 0.0, 0),
    ],
)
def test_gains_are_counted_from_the_last_one(
    figures: tuple[float, ...], min_delta: float, count: int
) -> None:
    rows = [evaluated(10 * i, figure) for i, figure in enumerate(figures)]
    assert without_gain(rows, "accuracy", min_delta) == count
    assert without_gain(rows[::-1], "accuracy", min_delta) == count, "by updates"
