"""Which checkpoint is exported as the best one."""

import asyncio
from pathlib import Path

import pytest

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.config.schema import Config
from megatron_opd.evaluation import best
from megatron_opd.evaluation.best import NotConverted, convert_step, export_best
from megatron_opd.evaluation.evaluations import Evaluations
from megatron_opd.sim.clock import run_virtual
from tests.support.evaluating import World
from tests.support.kept_states import FakeLearner, make_config, save_some


def a_run(tmp_path: Path) -> Config:
    options = {"checkpoint": {"every": 10, "keep_best": True}, "evaluation": {"every": 10}}
    config = make_config(tmp_path, **options)
    save_some(config, FakeLearner(), [10])
    return config


def evaluated(gains: set[int]) -> Evaluations:
    """Before the run and after 10 updates."""
    world = World(right={10})
    found = world.evaluations()

    async def scenario() -> None:
        await found.before({})
        world.right |= gains
        await world.train(found, 10)
        await found.finish()

    run_virtual(scenario())
    return found


def exported(config: Config, found: Evaluations) -> str:
    return asyncio.run(export_best(config, RunDir(config.run.dir), found))


def test_the_best_checkpoint_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = a_run(tmp_path), []

    async def convert(step: Path, target: Path, model: Path, dtype: str) -> None:
        asked.append((step.name, target, model, dtype))

    monkeypatch.setattr(best, "convert_step", convert)
    target = config.run.dir / "checkpoints" / "best"
    target.mkdir()
    assert exported(config, evaluated({11})).endswith(f"10 updates: {target}")
    assert asked == [("step-000010", target, Path("unused"), "bfloat16")]
    assert not target.exists(), "that of an earlier attempt makes room"


@pytest.mark.parametrize(
    ("gains", "lost", "said"),
    [
        (set(), False, "heldout (accuracy) is that before the run"),
        ({11}, True, "step-000010 is not there"),
        ({11}, False, "step-000010 cannot be converted: "),
    ],
)
def test_where_there_is_none_the_run_is_finished_all_the_same(
    tmp_path: Path, gains: set[int], lost: bool, said: str
) -> None:
    config = a_run(tmp_path)
    if lost:
        StepDirs(config.run.dir / "checkpoints").remove(10)
    line = exported(config, evaluated(gains)).replace("easy", "heldout")
    assert line.startswith("no best checkpoint: ")
    assert said in line
    assert exported(config, World().evaluations()).endswith("nothing was evaluated")


def test_what_conversion_says_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "learner").mkdir()
    with pytest.raises(NotConverted, match=r"--model .*nowhere must hold config\.json"):
        asyncio.run(convert_step(tmp_path, tmp_path / "out", tmp_path / "nowhere", "float32"))
