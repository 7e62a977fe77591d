"""Costs that are fitted to a run, which is a simulated one here, so that its costs are known."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_opd.cli.main import main
from megatron_opd.errors import UserError
from megatron_opd.sim.calibration import as_recorded, calibrate, config_of, staleness_distance
from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    RecordedLengths,
    ScoreCost,
    SyncCost,
    TurnLength,
    encode_costs,
    read_costs,
)
from megatron_opd.sim.world import simulate
from tests.support.looks import add_looks

COSTS = Costs(
    engine=EngineCost(step_s=0.02, step_request_s=0.004, request_s=0.01),
    teachers={"teacher": ScoreCost(pass_s=0.01, request_s=0.02, token_s=2e-4)},
    learner=LearnerCost(token_s=4e-4, update_s=0.3),
    sync=SyncCost(sync_s=0.2, paused_s=0.1),
    host_cores=1.5,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose costs are COSTS."""
    return recorded(tmp_path_factory.mktemp("recorded"))


def recorded(path: Path, **sections: Any) -> Path:
    """The directory of a run whose costs are COSTS, simulated inside `path`."""
    (path / "costs.json").write_bytes(encode_costs(COSTS))
    tree: dict[str, Any] = {
        "run": {"dir": str(path / "run"), "max_steps": 40},
        "data": {"train": "not here"},
        "student": {"model": "not here either"},
        "teacher": {"model": "not here either"},
        "buffer": {"batch_size": 8},
        "rollout": {"max_new_tokens": 60},
        "simulation": {"costs": str(path / "costs.json")},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    (path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert main(["simulate", str(path / "config.yaml")]) == 0
    add_looks(path / "run" / "trace.json", COSTS)
    return path / "run"


def test_the_costs_of_a_simulated_run_predict_it(run: Path):
    found = calibrate(run)
    assert abs(found.error) < 0.15  # of so few responses the halves differ
    outcome = simulate(config_of(run), found.fitted.costs, found.fitted.lengths)
    recorded = json.loads((run / "summary.json").read_text())
    assert outcome.tokens_per_s == pytest.approx(recorded["train_tokens_per_s"], rel=0.08)
    assert found.fitted.costs.host_cores == 1.5


def test_turns_and_answers_are_fitted_too(tmp_path: Path):
    """An environment that takes most of a trajectory's time; without it the run would be faster."""
    sections: dict[str, Any] = {
        "data": {"chat_template": True},
        "environment": {"type": "guess", "max_turns": 6},
        "simulation": {"turns": {"mean": 3, "answer_s": 2.0}},
    }
    run = recorded(tmp_path, **sections)
    found = calibrate(run)
    assert abs(found.error) < 0.15
    outcome = simulate(config_of(run), found.fitted.costs, found.fitted.lengths)
    summary = json.loads((run / "summary.json").read_text())
    assert outcome.tokens_per_s == pytest.approx(summary["train_tokens_per_s"], rel=0.1)
    at_once = RecordedLengths(
        pairs=found.fitted.lengths.pairs,
        trajectories=[
            tuple(TurnLength(turn.given, turn.sampled, 0.0) for turn in turns)
            for turns in found.fitted.lengths.trajectories
        ],
    )
    faster = simulate(config_of(run), found.fitted.costs, at_once)
    assert faster.tokens_per_s is not None
    assert faster.tokens_per_s > 1.3 * summary["train_tokens_per_s"]


def test_they_predict_another_schedule_and_a_doubled_stage_does_not(run: Path):
    """The limit is that of the benchmark: 10 %."""
    config = config_of(run).model_copy(update={"schedule": config_of(run).schedule})
    tree = config.model_dump(mode="json")
    tree["schedule"] = {"type": "sync"}
    sync = type(config).model_validate(tree)
    found = calibrate(run).fitted
    truth = simulate(sync, COSTS, found.lengths).tokens_per_s
    predicted = simulate(sync, found.costs, found.lengths).tokens_per_s
    assert predicted == pytest.approx(truth, rel=0.1)
    slow = json.loads(encode_costs(found.costs))
    slow["engine"] = {k: 2 * v if k.endswith("_s") else v for k, v in slow["engine"].items()}
    wrong = simulate(sync, Costs(**_decoded(slow)), found.lengths).tokens_per_s
    assert truth is not None
    assert wrong is not None
    assert abs(wrong / truth - 1) > 0.1


def _decoded(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        "engine": EngineCost(**tree["engine"]),
        "teachers": {name: ScoreCost(**cost) for name, cost in tree["teachers"].items()},
        "learner": LearnerCost(**tree["learner"]),
        "sync": SyncCost(**tree["sync"]),
        "host_cores": tree["host_cores"],
    }


def test_the_command_says_how_far_off_it_is(run: Path, capsys: pytest.CaptureFixture[str]):
    config = run.parent / "config.yaml"
    again = run.parent / "again"
    sets = ["--set", f"run.dir={again}", "--set", "simulation.costs=null"]
    assert main(["simulate", str(config), *sets, "--calibrate", str(run)]) == 0
    out = capsys.readouterr().out
    assert "error out of sample" in out
    assert "1.5" in out
    rows = (again / "metrics.jsonl").read_bytes()
    assert main(["simulate", str(again / "config.resolved.yaml"), "--overwrite"]) == 0
    assert (again / "metrics.jsonl").read_bytes() == rows, "it names costs and lengths"
    assert read_costs(again / "costs.json").engine.step_s == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        ("trace.json", "--calibrate: .*trace.json: No such file or directory; metrics.trace"),
        ("config.resolved.yaml", "is no run directory: config.resolved.yaml is not there"),
    ],
)
def test_what_is_no_recorded_run_is_refused(run: Path, tmp_path: Path, lost: str, why: str):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / lost).unlink()
    with pytest.raises(UserError, match=why):
        calibrate(tmp_path / "run")


def test_a_run_too_short_to_be_halved_is_refused(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    trace = tmp_path / "run" / "trace.json"
    kept, _, gone = trace.read_text().partition("update 15")
    looks = [line for line in gone.splitlines() if '"work"' in line or "CPU seconds" in line]
    trace.write_text(kept.rpartition("\n")[0] + "\n" + "\n".join(looks) + "\n")
    with pytest.raises(UserError, match=r"at least 16 updates, .*, got 15; record a longer run$"):
        calibrate(tmp_path / "run")


def test_what_is_predicted_is_what_was_recorded(run: Path):
    """Before: a run that was killed at once took as long to predict as all that it had planned."""
    changes = {"run": {"max_steps": 10**6}, "simulation": {"failures": {"mean_hours": 1.0}}}
    tree = config_of(run).model_dump(mode="json", exclude_unset=True)
    simulated = as_recorded(type(config_of(run)).model_validate(tree | changes), 17)
    assert simulated.run.max_steps == 17
    assert simulated.simulation.failures is None


def test_staleness_is_compared_as_shares(run: Path):
    outcome = simulate(config_of(run), COSTS)
    counts = outcome.totals.staleness.tokens.as_json()
    assert staleness_distance(outcome, {k: 10 * v for k, v in counts.items()}) == pytest.approx(0)
    assert staleness_distance(outcome, {"77": 5}) == pytest.approx(1.0)
