"""The study of hints, with made-up runs in place of real ones."""

import json
from pathlib import Path

import pytest

from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from studies import hints
from tests.support.paths import ROOT

AFTER = {
    "solution": 90.0,
    "wrong_solution": 40.0,
    "style": 33.0,
    "result": 0.5,
    "none": 36.0,
    "live": 0.0,
    "averaged": 30.0,
    "frozen": 60.0,
}
SHARES = {"solution": 0.5, "wrong_solution": 0.1, "style": 0.0, "result": 0.2, "none": None}


def launched(after: dict[str, float]):
    """Leaves what a run would have left."""

    def launch(command: list[str], log: Path) -> int:
        sets = dict(each.split("=", 1) for each in command if "=" in each)
        run_dir = Path(sets["run.dir"])
        run_dir.mkdir(parents=True)
        name = run_dir.name.split("-")[1]
        before = 35.0 if "evaluation.before" in sets and name == "none" else None
        summary = {
            "status": "finished",
            "student_accuracy_before_pct": before,
            "student_accuracy_after_pct": after[name],
        }
        (run_dir / "summary.json").write_text(json.dumps(summary))
        share = SHARES.get(name, 0.5)
        leak = {
            "leak_update": 0,
            "leak_hint_share": share,
            "leak_hint_share_error": None if share is None else 0.05,
            "leak_right_nats": 0.1,
            "leak_wrong_nats": 0.1,
            "leak_scored_tokens": 10,
        }
        rows = [
            {"update": n, "num_response_tokens": 5, "response_tokens_mean": 5.0, "loss": 0.1}
            | (leak if n else {})
            for n in range(2)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (run_dir / "metrics.jsonl").write_text(lines)
        return 0

    return launch


def test_what_is_said_of_runs(tmp_path: Path):
    found = hints.measure(["--dirty"], out=tmp_path / "out", launch=launched(AFTER))
    assert (found["failed"], found["missing"]) == ([], [])
    assert len(found["runs"]) == 3 * (len(hints.HINTS) + len(hints.TEACHERS))
    solution = found["settings"]["hint-solution"]
    assert solution["gain_pct"] == [55.0] * 3
    assert solution["hint_share"] == [0.5] * 3
    assert found["settings"]["hint-none"]["hint_share_mean"] is None
    assert all(each["leak_scored_tokens"] == 10 for each in found["runs"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"solution": 64.0}, "the right solution adds"),
        ({"style": 63.0}, "hint-style changes accuracy by"),
        ({"result": 30.0}, "hint-result: [30.0, 30.0, 30.0] % after"),
        ({"live": 30.0}, "teacher-live"),
        ({"frozen": 0.0}, "teacher-frozen"),
    ],
)
def test_what_is_not_as_the_page_says_fails(tmp_path: Path, changed: dict[str, float], said: str):
    out = launched(AFTER | changed)
    (line,) = hints.measure(["--dirty"], out=tmp_path / "out", launch=out)["failed"]
    assert said in line


def test_a_meter_that_ranks_wrongly_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SHARES, "style", 0.6)
    found = hints.measure(["--dirty"], out=tmp_path / "out", launch=launched(AFTER))
    assert found["failed"] == ["hint-style has a hint share above that of the right solution"]


def test_runs_differ_in_one_thing_from_the_example():
    base = load_config(Config, ROOT / hints.CONFIG)
    for trial in hints.trials():
        sets = [f"{key}={value}" for key, value in trial.overrides.items()]
        config = load_config(Config, ROOT / hints.CONFIG, sets)
        same = config.teacher.source == base.teacher.source
        assert same is (trial.setting == "hint")
        hinted = config.data.teacher_prompt_key == base.data.teacher_prompt_key
        assert hinted is (trial.method not in hints.HINTS or trial.method == "solution")
        assert config.metrics.leak_every == 8
