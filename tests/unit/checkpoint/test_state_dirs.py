"""Checkpoint directories: complete or not there, rotated, verified."""

from pathlib import Path

import pytest

from megatron_opd.checkpoint.state_dirs import LEARNER, StepDirs, verify
from megatron_opd.errors import UserError
from megatron_opd.run.checkpoints import CONTROLLER, RUN
from megatron_opd.run.resume import find_resumption, reopen_run_dir
from tests.support.kept_states import FakeLearner, make_config, save_some


@pytest.mark.parametrize("asynchronous", [True, False])
def test_only_the_last_and_the_multiples_are_kept(tmp_path: Path, asynchronous: bool) -> None:
    keep = {"every": 2, "keep_last": 2, "keep_every": 6, "async_save": asynchronous}
    config = make_config(tmp_path, checkpoint=keep)
    kept = save_some(config, FakeLearner(), list(range(1, 12)))
    dirs = StepDirs(config.run.dir / "checkpoints")
    assert dirs.complete() == [6, 8, 10]
    assert dirs.torn() == []
    assert kept.written_s.weight == kept.waited_s.weight == 5
    for updates in dirs.complete():
        verify(dirs.path(updates))


def test_what_is_being_removed_is_never_picked_up(tmp_path: Path, monkeypatch) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2, 4])
    dirs = StepDirs(config.run.dir / "checkpoints")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            dirs.remove(2)
    assert dirs.complete() == [4]
    assert [path.name for path in dirs.torn()] == ["step-000002.old.part"]
    reopen_run_dir(config, 4)
    assert dirs.torn() == []
    assert dirs.complete() == [4]


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    dirs = StepDirs(config.run.dir / "checkpoints")
    (dirs.path(2) / "mark").touch()
    save_some(config, FakeLearner(), [2])
    assert dirs.complete() == [2]
    assert not (dirs.path(2) / "mark").exists()


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (CONTROLLER, lambda b: b[:-1], r"damaged: controller.msgpack must have \d+ bytes, got"),
        (CONTROLLER, lambda b: b[:-1] + b"\xff", "damaged: controller.msgpack does not have the"),
        (RUN, lambda b: b"[]" + b[2:], "damaged: run.json does not have the checksum"),
        (f"{LEARNER}/__0_0.distcp", lambda b: b[:9], "__0_0.distcp must have 102 bytes, got 9"),
        ("manifest.json", lambda b: b[:20], "cannot read manifest.json"),
        ("manifest.json", lambda b: b.replace(b": 2,", b": 1,", 1), "format must be 2, got 1"),
        ("manifest.json", lambda b: b.replace(b'"sizes"', b'"s"'), "json has no table 'sizes'"),
        ("manifest.json", lambda b: b.replace(b'"crc32"', b'"c"'), "json has no table 'crc32'"),
        ("manifest.json", lambda b: b"[" * 100_000, "cannot read manifest.json"),
    ],
)
def test_damage_is_named_before_anything_starts(tmp_path: Path, name, damage, said) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    file = config.run.dir / "checkpoints" / "step-000002" / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=said) as caught:
        find_resumption(config)
    assert "\n" not in str(caught.value)
    assert "remove it to continue from an older one" in str(caught.value)


def test_a_renamed_checkpoint_is_not_that_of_its_new_name(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2, 4])
    dirs = StepDirs(config.run.dir / "checkpoints")
    dirs.path(2).rename(dirs.path(6))
    with pytest.raises(UserError, match="step-000006 was renamed: it is the one after 2 updates"):
        find_resumption(config)
