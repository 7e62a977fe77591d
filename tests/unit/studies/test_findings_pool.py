"""The pool that runs what is missing of the findings, and makes recorded runs again."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from studies.findings import pool as pool_module
from studies.findings import rows as rows_module
from studies.findings.again import chosen, made_again
from studies.findings.pool import run_missing
from studies.findings.servers import Pair
from studies.grid.trials import Trial


def left_by_a_run(run_dir: Path, cause: str | None) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    summary = dict.fromkeys(rows_module.SUMMARY, 1.0) | {"status": "failed", "cause": cause}
    (run_dir / "summary.json").write_text(json.dumps(summary | {"commit": "abc"}))
    (run_dir / "metrics.jsonl").write_text(json.dumps({"entropy_nats": 0.123456}) + "\n")
    evaluation = json.dumps({"update": 96, "accuracy_pct": 7.0})
    (run_dir / "evaluations.jsonl").write_text(f"{evaluation}\n")


class FakeRuns:
    """In place of servers and runs: `causes` of failure by name, one for each attempt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, causes: dict[str, list[str | None]]):
        self.causes, self.started, self.rewound, self.pairs = causes, [], 0, 0
        monkeypatch.setattr(pool_module, "serving", self.serving)
        monkeypatch.setattr(Pair, "rewind", self.rewind)
        monkeypatch.setattr(pool_module.Pool, "run", self.run)
        self.lock = threading.Lock()

    @contextmanager
    def serving(self, config: Path, logs: Path, ports: tuple[int, int]) -> Any:
        self.pairs += 1
        yield Pair({"student": f"http://127.0.0.1:{ports[0]}", "teacher": "http://x:1"})

    def rewind(self, pair: Any = None) -> None:
        self.rewound += 1

    def run(self, pool: Any, command: list[str] | None = None, log: Path | None = None) -> int:
        command, log = (pool, command) if log is None else (command, log)
        if "eval" in command:
            out = Path(command[command.index("--out") + 1])
            assert (out.parent / "checkpoints" / "final").is_dir()
            out.write_text(json.dumps({"rows": [{"accuracy_pct": 64.5}]}))
            return 0
        values = dict(each.split("=", 1) for each in command if "=" in each)
        run_dir = Path(values["run.dir"])
        assert values["student.urls"].startswith('["http://127.0.0.1:')
        with self.lock:
            self.started.append(run_dir.name)
            causes = self.causes.get(run_dir.name, [])
            cause = causes.pop(0) if causes else None
        log.write_text("the log's last line")
        left_by_a_run(run_dir, cause)
        if values.get("checkpoint.export_hf") == "true":
            (run_dir / "checkpoints" / "final").mkdir(parents=True)
        return 0 if cause is None else 1


def trials(count: int) -> list[Trial]:
    return [Trial("k0", f"m{i}", 1, Path("x.yaml"), {}) for i in range(count)]


def test_a_pool_runs_what_is_missing_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fakes, rows = FakeRuns(monkeypatch, {}), tmp_path / "rows.jsonl"
    found = run_missing(trials(2), rows, tmp_path / "out", jobs=2, budget_s=60)
    assert found.keys() == {"k0-m0-1", "k0-m1-1"}
    again = run_missing(trials(5), rows, tmp_path / "out", jobs=2, budget_s=60)
    assert Counter(fakes.started) == Counter(f"k0-m{i}-1" for i in range(5))
    assert fakes.rewound == 5, "each run begins with the first weights"
    assert again["k0-m0-1"] == found["k0-m0-1"]
    assert len(rows.read_text().splitlines()) == 5
    assert again["k0-m3-1"]["curves"]["entropy_nats"] == [0.123], "three digits"
    assert again["k0-m3-1"]["evaluations"] == [{"update": 96, "accuracy_pct": 7.0}]
    assert "urls" not in again["k0-m3-1"]["command"], "it can be repeated without these servers"
    assert not (tmp_path / "out" / "k0-m3-1").exists()


def test_the_checkpoint_of_a_run_that_exports_one_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    FakeRuns(monkeypatch, {})
    (plain,) = trials(1)
    exporting = replace(plain, method="exporting", overrides={"checkpoint.export_hf": "true"})
    rows = tmp_path / "rows.jsonl"
    found = run_missing([plain, exporting], rows, tmp_path / "out", jobs=1, budget_s=60)
    assert found[exporting.name]["summary"]["learner_accuracy_after_pct"] == 64.5
    assert "learner_accuracy_after_pct" not in found[plain.name]["summary"]


def test_a_pool_that_is_stopped_begins_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fakes = FakeRuns(monkeypatch, {})
    ended = fakes.run

    def told_to_end(pool: Any, command: list[str], log: Path) -> int:
        ended(pool, command, log)
        (tmp_path / "out" / "k0-m0-1" / "summary.json").write_text('{"status": "interrupted"}')
        pool.stop(KeyboardInterrupt())
        return 130

    monkeypatch.setattr(pool_module.Pool, "run", told_to_end)
    with pytest.raises(KeyboardInterrupt):
        run_missing(trials(2), tmp_path / "rows", tmp_path / "out", jobs=1, budget_s=60)
    assert fakes.started == ["k0-m0-1"]
    assert fakes.pairs == 1, "no servers are started for another attempt"


def test_recorded_runs_made_again_are_compared_figure_for_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fakes = FakeRuns(monkeypatch, {})
    known = trials(6)
    kept = run_missing(known, tmp_path / "rows.jsonl", tmp_path / "out", jobs=2, budget_s=60)
    drawn = chosen(known, kept, 3, seed=1)
    assert len({trial.name for trial in drawn}) == 3
    assert drawn != chosen(known, kept, 3, seed=2)
    assert made_again(drawn, kept, jobs=2) == {
        "again": {trial.name: [] for trial in drawn},
        "failed": False,
    }
    assert len(fakes.started) == 9
    other = json.loads(json.dumps(kept[drawn[0].name]))
    other["curves"]["entropy_nats"] = [0.124]
    other["summary"]["student_accuracy_after_pct"] = 2.0
    found = made_again(drawn, {**kept, drawn[0].name: other}, jobs=2)
    assert found["again"][drawn[0].name] == ["entropy_nats", "student_accuracy_after_pct"]
    assert found["failed"] is True
    unnamed = {key: value for key, value in other.items() if key != "cpu"}
    assert chosen(drawn[:1], {drawn[0].name: unnamed}, 1, seed=1) == [], "another processor's bits"
    clock = Trial("clock", "async", 1, Path("x.yaml"), {})
    assert chosen([clock], {clock.name: other}, 1, seed=1) == [], "it depends on the clock"


def test_a_pool_out_of_time_begins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fakes = FakeRuns(monkeypatch, {})
    assert run_missing(trials(2), tmp_path / "rows", tmp_path / "out", jobs=2, budget_s=0) == {}
    assert fakes.started == []


def test_a_loss_that_is_not_finite_is_a_result_and_another_failure_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    causes = {"k0-m0-1": ["the loss is nan at update 3"], "k0-m1-1": ["a server is gone", None]}
    fakes = FakeRuns(monkeypatch, causes)
    found = run_missing(trials(2), tmp_path / "rows", tmp_path / "out", jobs=1, budget_s=60)
    assert found["k0-m0-1"]["status"] == "diverged"
    assert found["k0-m1-1"]["status"] == "finished"
    assert fakes.pairs == 2, "the second attempt has new servers"


def test_a_run_that_fails_twice_ends_the_pool_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fakes = FakeRuns(monkeypatch, {"k0-m0-1": ["a server is gone"] * 2})
    with pytest.raises(RuntimeError, match=r"k0-m0-1 failed twice:\nthe log's last line"):
        run_missing(trials(3), tmp_path / "rows", tmp_path / "out", jobs=1, budget_s=60)
    assert fakes.started == ["k0-m0-1"] * 2, "nothing begins after it"
