"""How one command begins, continues and leaves alone."""

import json
from pathlib import Path

import pytest

from megatron_opd.errors import UserError
from megatron_opd.run.resume import Start, find_resumption, how_to_start
from tests.support.kept_states import FakeLearner, make_config, save_some


def summarise(run_dir: Path, status: str, updates: int) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"status": status, "updates": updates}))


def test_one_command_for_every_start_of_a_job(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert how_to_start(config) == Start()
    save_some(config, FakeLearner(), [])  # ended before its first checkpoint
    summarise(config.run.dir, "preempted", 0)
    assert how_to_start(config) == Start(overwrite=True)
    other = make_config(tmp_path, run={"seed": 7})
    with pytest.raises(UserError, match=r"run\.seed must be unchanged from"):
        how_to_start(other)
    save_some(config, FakeLearner(), [2])
    assert how_to_start(config) == Start(resume=True)
    summarise(config.run.dir, "finished", 20)
    assert how_to_start(config) is None
    assert how_to_start(make_config(tmp_path, run={"max_steps": 21})) == Start(resume=True)
    (config.run.dir / "summary.json").write_text("[]")
    with pytest.raises(UserError, match=r"summary\.json is damaged: not a run's summary"):
        how_to_start(config)


def test_a_run_that_stopped_early_is_finished(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    summary = {"status": "finished", "updates": 2, "stopped_early_at": 2}
    (config.run.dir / "summary.json").write_text(json.dumps(summary))
    assert how_to_start(config) is None
    assert find_resumption(config).state.updates == 2, "unless the user asks for more"
    (config.run.dir / "summary.json").write_text(json.dumps(summary | {"status": "preempted"}))
    assert how_to_start(config) == Start(resume=True)


def test_a_finished_run_without_checkpoints_is_not_removed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [])
    summarise(config.run.dir, "finished", 20)
    assert how_to_start(config) is None
    longer = make_config(tmp_path, run={"max_steps": 30})
    assert how_to_start(longer) == Start(resume=True)
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        find_resumption(longer)


def test_a_simulated_run_is_begun_for_real(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [])
    summary = {"status": "finished", "updates": 20, "simulated": True}
    (config.run.dir / "summary.json").write_text(json.dumps(summary))
    assert how_to_start(config) == Start(overwrite=True)


def test_a_run_that_lacks_only_its_last_evaluation_is_continued(tmp_path: Path) -> None:
    """Before: one that was preempted there could not be continued, and had no final model."""
    config = make_config(tmp_path, run={"max_steps": 2})
    save_some(config, FakeLearner(), [2])
    summarise(config.run.dir, "preempted", 2)
    assert how_to_start(config) == Start(resume=True)
    assert find_resumption(config).state.updates == 2
    summarise(config.run.dir, "finished", 2)
    with pytest.raises(UserError, match=r"run\.max_steps must be above the 2 updates"):
        find_resumption(config)
