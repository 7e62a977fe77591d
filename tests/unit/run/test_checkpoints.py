"""What writes checkpoints while a run trains."""

import asyncio
from pathlib import Path

import pytest

from megatron_opd.checkpoint.run_lock import RunLock
from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.config.sections import CheckpointConfig
from megatron_opd.errors import CheckpointFailed
from megatron_opd.run.resume import find_resumption
from tests.support.kept_states import FakeLearner, make_config, save_some


def test_training_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    waits = {}
    for asynchronous in (True, False):
        where = tmp_path / str(asynchronous)
        where.mkdir()
        config = make_config(where, checkpoint={"every": 2, "async_save": asynchronous})
        kept = save_some(config, FakeLearner(delay_s=0.5), [2])
        waits[asynchronous] = kept.waited_s.value
    assert waits[True] < 0.4 < 0.5 <= waits[False]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failure_to_write_is_raised_and_leaves_the_last_one(
    tmp_path: Path, asynchronous: bool
) -> None:
    parallel = {"parallel": {"dp": 2}}
    options = {"every": 2, "async_save": asynchronous}
    config = make_config(tmp_path, learner=parallel, checkpoint=options)
    save_some(config, FakeLearner(ranks=2), [2])
    learner = FakeLearner(ranks=2, fail="OSError: No space left on device")
    with pytest.raises(CheckpointFailed, match=r"step-000004.part: OSError: No space left"):
        save_some(config, learner, [4, 6])
    dirs = StepDirs(config.run.dir / "checkpoints")
    assert dirs.complete() == [2]
    found = find_resumption(config)
    assert found.state.updates == 2
    assert found.notes[0] == "step-000004.part was not written completely and is ignored"
    assert "step-000002 (2 updates)" in found.notes[1]


def test_a_failure_that_could_not_even_be_written_is_told(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(CheckpointFailed, match=r"could not be written \(\d+\.\d MB are free there"):
        save_some(config, FakeLearner(fail=""), [2])


def test_a_checkpoint_is_due_after_so_many_minutes(tmp_path: Path) -> None:
    """Before: with the default settings none was ever written."""
    assert CheckpointConfig().every == 0
    assert CheckpointConfig().every_minutes == 10
    config = make_config(tmp_path, checkpoint={"every": 0})
    dirs = StepDirs(config.run.dir / "checkpoints")
    save_some(config, FakeLearner(), [1, 2, 3])
    assert dirs.complete() == []
    soon = make_config(tmp_path, checkpoint={"every": 0, "every_minutes": 1e-6})
    save_some(soon, FakeLearner(), [1, 2, 3])
    assert dirs.complete() == [2, 3]
    off = make_config(tmp_path, checkpoint={"every": 0, "every_minutes": 0})
    assert not off.checkpoint.writes


def test_a_checkpoint_of_a_run_that_lost_its_directory_gets_no_name(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    lock = RunLock.take(config.run.dir)
    save_some(config, FakeLearner(), [2], lock.claim)
    lock.release()
    with RunLock.take(config.run.dir) as newer:
        with pytest.raises(CheckpointFailed, match="now belongs to pid"):
            save_some(config, FakeLearner(), [4], lock.claim)
        save_some(config, FakeLearner(), [6], newer.claim)
    assert StepDirs(config.run.dir / "checkpoints").complete() == [2, 6]


def test_a_run_that_ends_early_keeps_its_last_update_once(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    dirs = StepDirs(config.run.dir / "checkpoints")
    learner = FakeLearner()
    save_some(config, learner, [2], at_end=2)
    assert len(learner.tasks) == 1, "it is kept already"
    save_some(config, learner, [2], at_end=3)
    assert dirs.complete() == [2, 3]
    save_some(config, learner, [], at_end=3, since=3)
    assert len(learner.tasks) == 3, "it was continued from there"
    off = make_config(tmp_path, checkpoint={"every": 0, "every_minutes": 0})
    save_some(off, learner, [], at_end=5)
    assert dirs.complete() == [2, 3]


class Wanting:
    """Evaluates after every third update, and wants some checkpoints kept."""

    def __init__(self) -> None:
        self.wanted: frozenset[int] = frozenset()

    def falls_on(self, updates: int) -> bool:
        return updates % 3 == 0


def test_the_best_checkpoint_is_written_with_its_evaluation_and_kept(tmp_path: Path) -> None:
    options = {"every": 0, "every_minutes": 0, "keep_last": 1, "keep_best": True}
    config = make_config(tmp_path, checkpoint=options, evaluation={"every": 3})
    dirs, wanting = StepDirs(config.run.dir / "checkpoints"), Wanting()
    assert config.checkpoint.writes
    save_some(config, FakeLearner(), list(range(1, 7)), evaluations=wanting)
    assert dirs.complete() == [6]
    wanting.wanted = frozenset({6})
    save_some(config, FakeLearner(), list(range(7, 13)), evaluations=wanting)
    assert dirs.complete() == [6, 12]
    wanting.wanted = frozenset({12})
    save_some(config, FakeLearner(), [15], evaluations=wanting)
    assert dirs.complete() == [12, 15]
    kept = save_some(config, FakeLearner(), [18], evaluations=wanting)
    assert dirs.complete() == [12, 18]
    wanting.wanted = frozenset({18})
    asyncio.run(kept.rotate())
    assert dirs.complete() == [18], "the last evaluation may end after the last checkpoint"
    checkpoint = config.checkpoint.model_copy(update={"keep_best": False})
    without = config.model_copy(update={"checkpoint": checkpoint})
    save_some(without, FakeLearner(), [21], evaluations=wanting)
    assert dirs.complete() == [18], "nothing was asked for"
