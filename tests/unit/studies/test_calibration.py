"""The study of calibration, with simulated runs in place of real ones: their costs are known."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_opd.cli.main import main
from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    ScoreCost,
    SyncCost,
    encode_costs,
    read_costs,
)
from studies import calibration
from tests.support.looks import add_looks
from tests.support.paths import ROOT

COSTS = Costs(
    engine=EngineCost(step_s=0.004, step_request_s=2e-4),
    teachers={"teacher": ScoreCost(request_s=0.004, token_s=2e-5)},
    learner=LearnerCost(token_s=5e-5, update_s=0.02),
    sync=SyncCost(sync_s=0.05, paused_s=0.04),
    host_cores=2.0,
)
UPDATES = 16


def simulated(costs: Path):
    """Launches a simulated run, whatever run is asked for."""

    def launch(command: list[str], log: Path) -> int:
        verb = command.index("run")
        given = command[verb + 1 :]
        sets = ["--set", f"run.max_steps={UPDATES}", "--set", "simulation.lengths.mean=36"]
        code = main(["simulate", *given, *sets, "--costs", str(costs)])
        (run_dir,) = (Path(each.partition("=")[2]) for each in given if each.startswith("run.dir="))
        add_looks(run_dir / "trace.json", read_costs(costs))
        return code

    return launch


def test_predictions_hold_and_doubled_stages_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "arithmetic", "examples/arithmetic")
    costs, rows = tmp_path / "costs.json", tmp_path / "schedules_rows.jsonl"
    costs.write_bytes(encode_costs(COSTS))
    speeds = {"sync": (90.0, 100.0, 110.0), "async": (100.0, 100.0, 104.0)}
    rows.write_text(
        "".join(
            json.dumps({"name": f"mc64-{k}-{i}", "summary": {"train_tokens_per_s": v}}) + "\n"
            for k, values in speeds.items()
            for i, v in enumerate(values, 1)
        )
    )
    monkeypatch.setattr(calibration, "SCHEDULES", rows)
    found = calibration.measure(launch=simulated(costs), out=tmp_path / "out")
    assert found["spread_of_seeds"]["sync"] == pytest.approx(0.1)
    assert found["limit"] == pytest.approx(0.1)
    assert set(found["runs"]) == {calibration.FITTED, *calibration.CHECKED}
    for name, run in found["runs"].items():
        assert run["holds"], (name, run["error"])
        assert run["staleness_distance"] < 0.2
    assert min(abs(e) for e in found["controls"]["student"].values()) > found["limit"]
