"""What `python -m checks watched_demo` calls a fault."""

import copy
from pathlib import Path
from typing import Any

import pytest

from checks.watched_demo import by_set, faults, holding, lines_of

ROW = {
    **{"accuracy_pct": 50.123, "stderr_pct": None, "version_min": 10, "version_max": 12},
    **{"lag_steps": 2, "seconds": 7.5, "samples": 4},
}
COURSE = {str(update): {"accuracy_pct": 50.0} for update in (0, 10, 60)}
GOOD: dict[str, Any] = {
    "status": "finished",
    "evaluations": {"short": COURSE, "long": COURSE},
    "wandb": {"missing": [], "files_with_the_key": []},
    "rollouts_recorded": 480,
    "watch": {"state": "running", "console_problems": []},
    "report": {"console_problems": []},
}


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        ("status", "failed", "not finished"),
        ("evaluations", {"short": COURSE}, "a set without a course"),
        ("evaluations", {"short": COURSE, "long": {}}, "a set without a course"),
        ("wandb.missing", ["train/loss"], "W&B lacks a figure"),
        ("wandb.files_with_the_key", ["wandb.json"], "a file holds the key"),
        ("rollouts_recorded", 0, "no rollouts"),
        ("watch.state", "finished", "not watched while it ran"),
        ("watch.console_problems", ["error: x"], "a page complained"),
        ("report.console_problems", ["error: x"], "a page complained"),
    ],
)
def test_what_must_not_be_is_a_fault(place: str, value: Any, fault: str) -> None:
    assert faults(GOOD) == faults(GOOD | {"watch": None}) == []
    figures = copy.deepcopy(GOOD)
    *parts, last = place.split(".")
    inner = figures[parts[0]] if parts else figures
    inner[last] = value
    assert faults(figures) == [fault]


def test_rows_are_kept_by_set_and_update() -> None:
    rows = [{"set": name, "update": n, **ROW} for n in (0, 10) for name in ("short", "long")]
    found = by_set(rows)
    assert list(found) == ["short", "long"]
    assert list(found["long"]) == ["0", "10"]
    assert found["long"]["10"] == {
        **{"accuracy_pct": 50.12, "stderr_pct": None, "version_min": 10, "version_max": 12},
        **{"lag_steps": 2, "seconds": 7.5},
    }


def test_a_key_is_found_in_any_file_and_a_torn_line_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_bytes(b"\xff key=abc")
    (tmp_path / "b").write_text("nothing")
    assert holding(tmp_path, "abc") == ["logs/a.log"]
    (tmp_path / "rows").write_text('{"a": 1}\n{"a": ')
    assert lines_of(tmp_path / "rows") == [{"a": 1}]
