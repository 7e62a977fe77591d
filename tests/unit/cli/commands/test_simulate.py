"""`opd simulate`: the run directory is one that other tools read, and says that it is simulated."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from megatron_opd.cli.main import main
from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    ScoreCost,
    SyncCost,
    encode_costs,
)
from megatron_opd.sim.recording import read_recording
from megatron_opd.sim.simulate import NOT_SIMULATED
from tests.support.cli_cases import refused

COSTS = Costs(
    engine=EngineCost(step_s=0.01),
    teachers={"teacher": ScoreCost(token_s=1e-4)},
    learner=LearnerCost(token_s=1e-5, update_s=0.5),
    sync=SyncCost(sync_s=0.5, paused_s=0.2),
)

NAMED = ("--set", "data.teacher_key=of")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run"), "max_steps": 8},
        "data": {"train": "not here"},
        "student": {"model": "not here either", "servers": 2},
        "teacher": {"model": "not here either"},
        "buffer": {"batch_size": 4},
        "simulation": {"costs": str(tmp_path / "costs.json")},
    }
    (tmp_path / "costs.json").write_bytes(encode_costs(COSTS))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_simulated_run_is_a_run_directory(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(config)]) == 0
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["simulated"], summary["status"], summary["updates"]) == (True, "finished", 8)
    assert summary["samples_consumed"] == 32
    assert [row["update"] for row in rows(run)] == list(range(8))
    assert rows(run)[-1]["time_s"] < summary["wall_s"]
    for name in NOT_SIMULATED:
        assert summary.get(name) is None
        assert all(row.get(name) is None for row in rows(run))
    trace = json.loads((run / "trace.json").read_text())
    assert sum(event["name"].startswith("rollout ") for event in trace) == 32
    assert len(read_recording(run).lengths.pairs) == 32
    said = capsys.readouterr().out
    assert "updates/h" in said
    assert "limited by: " in said


def test_evaluations_are_said_to_be_ignored(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(config), "--set", "evaluation.every=2"]) == 0
    assert "note:" not in capsys.readouterr().out, "there is no set"
    options = ["--set", "evaluation={every: 2, servers: 1}", "--set", "data.heldout=there"]
    assert main(["simulate", str(config), "--overwrite", *options]) == 0
    assert "note: evaluation.every is ignored" in capsys.readouterr().out
    sampled = [row["servers"] for row in rows(tmp_path / "run")]
    busy = {url for row in sampled for url, found in row.items() if found["rollouts"]}
    assert busy == {"http://student-1:1"}, "the first one is kept for evaluations"


def test_equal_seeds_write_equal_rows(config: Path, tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        assert main(["simulate", str(config), "--set", f"run.dir={tmp_path / name}"]) == 0
        found.append((tmp_path / name / "metrics.jsonl").read_bytes())
    assert found[0] == found[1]
    other = [f"run.dir={tmp_path / 'three'}", "simulation.seed=1"]
    assert main(["simulate", str(config), "--set", other[0], "--set", other[1]]) == 0
    assert (tmp_path / "three" / "metrics.jsonl").read_bytes() != found[0]


def test_lengths_of_a_recorded_run_are_drawn(config: Path, tmp_path: Path) -> None:
    assert main(["simulate", str(config)]) == 0
    again = [f"run.dir={tmp_path / 'again'}", f"simulation.lengths.recorded={tmp_path / 'run'}"]
    assert main(["simulate", str(config), "--set", again[0], "--set", again[1]]) == 0
    recorded, drawn = (
        read_recording(tmp_path / "run").lengths,
        read_recording(tmp_path / "again").lengths,
    )
    assert set(drawn.pairs) <= set(recorded.pairs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--costs", "none.json"], "none.json: No such file or directory"),
        (
            ["--set", "simulation={gpu: v100}"],
            "simulation.gpu: input should be 'a100', 'h20', 'h100', 'h200' or 'b200', got 'v100'",
        ),
        (["--set", "simulation.gpu=h20"], "gpu has no effect with costs"),
        (["--set", "simulation={}"], "student.model must be a Hugging Face checkpoint directory"),
        (["--set", "simulation.lengths.recorded=none"], "none/trace.json: No such file"),
        (["--set", "simulation.lengths.cv=1e200"], "cv: input should be less than or equal to"),
        (["--set", "teacher=null", "--set", "teachers={b: {model: m}}", *NAMED], "missing b"),
        (
            [
                *("--set", "environment={type: guess, history: branch}"),
                *("--set", "data.chat_template=true"),
            ],
            "environment.history must be append for a prediction, which does not know how often",
        ),
    ],
)
def test_mistakes_are_named_and_leave_nothing(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    assert main(["simulate", str(config), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_resolved_configuration_names_the_costs_that_were_given(
    config: Path, tmp_path: Path
) -> None:
    costs = (tmp_path / "costs.json").rename(tmp_path / "given.json")
    sets = ["--set", "simulation={gpu: h100}"]
    assert main(["simulate", str(config), *sets, "--costs", str(costs)]) == 0
    first = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    resolved = tmp_path / "run" / "config.resolved.yaml"
    assert main(["simulate", str(resolved), "--overwrite"]) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == first


def test_a_mixture_costs_the_time_of_each_of_its_teachers(config: Path, tmp_path: Path) -> None:
    """Scoring limits this run: two teachers, one after the other, take about twice as long."""
    slow = {"teacher": ScoreCost(token_s=1e-2), "b": ScoreCost(token_s=1e-2)}
    (tmp_path / "costs.json").write_bytes(encode_costs(replace(COSTS, teachers=slow)))
    walls = []
    for weights in ("{teacher: 1.0, b: 0}", "{teacher: 0.5, b: 0.5}"):
        several = ["--set", "teachers={b: {model: m}}", "--set", f"scoring.mixture={weights}"]
        alone = ["--set", "scoring.concurrency=1"]
        assert main(["simulate", str(config), *several, *alone, "--overwrite"]) == 0
        walls.append(json.loads((tmp_path / "run" / "summary.json").read_text())["wall_s"])
    assert 1.8 < walls[1] / walls[0] < 2.1, walls


def test_teachers_that_follow_the_student(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    following = ["--set", "teacher.source={type: lagged, every: 2}"]
    assert main(["simulate", str(config), *following]) == 0
    said = "note: teacher.source: weight syncs of teachers are not predicted\n"
    assert said in capsys.readouterr().out
    shared = ["--set", "teacher.source={type: student, share: 0.5}"]
    code = main(["simulate", str(config), *shared, "--overwrite"])
    refused(capsys, code, "teacher.source.share must be null", "got 0.5; leave it out")


def test_a_teacher_that_writes_is_not_predicted(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["simulate", str(config), "--set", "objective={type: sft_on_teacher}"])
    refused(capsys, code, "objective.type must not be sft_on_teacher", "leave that term out")


def test_an_earlier_run_is_kept_unless_told(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(config)]) == 0
    assert main(["simulate", str(config)]) == 2
    assert "pass --overwrite" in capsys.readouterr().err
    assert main(["simulate", str(config), "--overwrite"]) == 0


@pytest.mark.parametrize("product", ["checkpoints/final", "logs/learner.log"])
def test_a_run_that_trained_is_never_replaced(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], product: str
) -> None:
    assert main(["simulate", str(config)]) == 0
    kept = tmp_path / "run" / product
    kept.parent.mkdir(exist_ok=True)
    kept.touch()
    capsys.readouterr()
    refused(capsys, main(["simulate", str(config), "--overwrite"]), "run.dir", "of a real run")
    assert kept.exists()
