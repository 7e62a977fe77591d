"""Checkpoint directories: complete or not there, rotated, verified; and what writes them."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_opd.checkpoint.run_lock import Claim, RunLock
from megatron_opd.checkpoint.state_dirs import LEARNER, StepDirs, verify
from megatron_opd.checkpoint.state_files import (
    check_size,
    read_sums,
    sum_file,
    sums_name,
    write_sums,
)
from megatron_opd.cli.checkpoints import CONTROLLER, RUN, CheckpointFailed, Checkpoints
from megatron_opd.cli.errors import UserError
from megatron_opd.cli.resume import Change, find_resumption, reopen_run_dir
from megatron_opd.config.load import dump_config, load_config
from megatron_opd.config.schema import Config
from megatron_opd.config.sections import CheckpointConfig
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.learner.state.facts import read_facts
from megatron_opd.learner.state.write import explained, one_line


class FakeLearner:
    """Writes one file per rank, later than it answers if told to."""

    def __init__(self, ranks: int = 1, fail: str | None = None, delay_s: float = 0.0) -> None:
        self.ranks, self.fail, self.delay_s = ranks, fail, delay_s
        self.tasks: list[asyncio.Task[None]] = []

    async def save_state(self, path: Path, updates: int, *, in_background: bool) -> None:
        await asyncio.to_thread(path.mkdir)
        writing = asyncio.create_task(self._write(path, updates))
        self.tasks.append(writing)
        if not in_background:
            await writing

    async def _write(self, path: Path, updates: int) -> None:
        await asyncio.sleep(self.delay_s)
        for rank in range(self.ranks):
            if self.fail is not None and rank == self.ranks - 1:
                (path / f"failed-{rank:05d}").write_text(self.fail)
                return
            (path / f"__{rank}_0.distcp").write_bytes(b"w" * (100 + updates))
            write_sums(path, rank, [f"__{rank}_0.distcp"])


def make_config(tmp_path: Path, **sections: Any) -> Config:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    server = {"model": "unused", "dtype": "float32"}
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run"), "max_steps": 20},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "student": server,
        "teacher": server,
        "checkpoint": {"every": 2},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


def at(updates: int) -> ControllerState:
    return ControllerState(updates, updates, updates, updates, {}, 0, updates, [])


def save_some(
    config: Config, learner: FakeLearner, updates: list[int], claim: Claim | None = None
) -> Checkpoints:
    """Checkpoints after each of `updates`, as a run would make them."""
    dirs = StepDirs(config.run.dir / "checkpoints")
    config.run.dir.mkdir(exist_ok=True)
    (config.run.dir / "config.resolved.yaml").write_text(dump_config(config))
    extras: dict[str, Any] = {"elapsed_s": 1.0, "wall_s": 1.0, "resumed_at_updates": []}
    extras |= {"accuracies": {}, "totals": {}}
    kept = Checkpoints(dirs, config, learner, lambda: extras, lambda line: None, claim)

    async def main() -> None:
        from megatron_opd.data.records import data_crc32

        extras["train_crc32"] = data_crc32(config.data.train)
        for done in updates:
            await kept.after_update(done, lambda done=done: at(done))
        await kept.finish()

    asyncio.run(main())
    return kept


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


def test_torch_s_reason_is_told_with_the_space_that_is_left(tmp_path: Path) -> None:
    cause = RuntimeError("unexpected pos 704\nvs 598")
    failed = CheckpointException("write", {3: (cause, None), 1: (OSError("first"), None)})
    assert not isinstance(failed, Exception), "what catches Exception would miss it"
    assert re.fullmatch(
        r"OSError: first \(\d+\.\d MB are free there\)", explained(failed, tmp_path)
    )
    assert explained(cause, tmp_path).startswith("RuntimeError: unexpected pos 704 vs 598 (")
    assert one_line(failed) == "OSError: first"


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


def test_what_a_run_kept_must_be_whole(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    for key in ("train_crc32", "totals", "elapsed_s"):
        save_some(config, FakeLearner(), [2])
        step = config.run.dir / "checkpoints" / "step-000002"
        extras = json.loads((step / RUN).read_text())
        (step / RUN).write_text(json.dumps(extras | {key: None}))
        manifest = json.loads((step / "manifest.json").read_text())
        found = sum_file(step, RUN)
        manifest["sizes"][RUN], manifest["crc32"][RUN] = found.size, found.crc32
        (step / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match=f"run.json has no {key}; remove it"):
            find_resumption(config)


def test_what_may_change_and_what_may_not(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    harmless = make_config(
        tmp_path,
        run={"max_steps": 40},
        checkpoint={"every": 5, "keep_last": 9},
        student={"servers": 2, "base_port": 30000, "api_key_env": "OPD_STUDENT_KEY"},
        learner={"parallel": {"tp": 2}, "threads": 3},
        evaluation={"problems": 1},
        scoring={"guard": "warn", "guard_stop_after": 0},
        rollout={"concurrency": 3},
    )
    assert find_resumption(harmless).state == at(2)
    for section, key, value in (
        ("run", "seed", 7),
        ("buffer", "batch_size", 8),
        ("rollout", "temperature", 0.5),
        ("student", "model", "other"),
        ("learner", "num_mini_batches", 2),
    ):
        changed = make_config(tmp_path, **{section: {key: value}})
        with pytest.raises(UserError, match=rf"--resume: {section}\.{key} must be unchanged from"):
            find_resumption(changed)
    with pytest.raises(UserError, match=r"run\.max_steps must be above the 2 updates"):
        find_resumption(make_config(tmp_path, run={"max_steps": 2}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+2="}\n')
    with pytest.raises(UserError, match="has changed since the run began"):
        find_resumption(config)


def test_what_is_learnt_may_change_if_the_user_insists(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    slower = make_config(tmp_path, learner={"optimizer": {"lr": 1e-7}})
    key = "learner.optimizer.lr"
    with pytest.raises(UserError, match=f"got 1e-07; to change it anyway: --accept-changes {key}"):
        find_resumption(slower)
    found = find_resumption(slower, [key])
    line = f"resumed at 2 updates with {key} changed from 1e-06 to 1e-07"
    assert [change.line for change in found.changes] == [line]
    assert line in found.notes
    run_dir = reopen_run_dir(slower, 2, found.changes)
    assert run_dir.resolved_config.read_text().startswith(f"# {line}\n")
    assert load_config(Config, run_dir.resolved_config) == slower
    # the next resumption goes on with what was accepted, and adds to it
    assert find_resumption(slower).changes == found.changes
    more = make_config(tmp_path, learner={"optimizer": {"lr": 1e-7}}, run={"seed": 7})
    both = (*found.changes, Change(2, "run.seed", 1234, 7))
    assert find_resumption(more, ["run.seed"]).changes == both
    run_dir.changes.write_text("[1]")
    with pytest.raises(UserError, match=r"changes\.json is damaged"):
        find_resumption(slower)


@pytest.mark.parametrize(
    ("sections", "accepted", "words"),
    [
        ({"student": {"model": "other"}}, "student.model", "weights and samples are of that model"),
        ({"learner": {"dtype": "float32"}}, "learner.dtype", "are stored in it"),
        ({"buffer": {"batch_size": 8}}, "buffer.batch_size", "were admitted under it"),
        ({"support": {"type": "topk"}}, "support.type", "were cached with it"),
        ({}, "run.seed", "run.seed has not changed"),
        ({}, "run.sed", "run.sed is not a key of this run"),
        ({"run": {"seed": 7}}, "learner.optimizer.lr", r"\(differing: run.seed\)"),
    ],
)
def test_insisting_on_what_cannot_work_is_refused(
    tmp_path: Path, sections: dict[str, Any], accepted: str, words: str
) -> None:
    save_some(make_config(tmp_path), FakeLearner(), [2])
    with pytest.raises(UserError, match=words):
        find_resumption(make_config(tmp_path, **sections), [accepted])


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


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(UserError, match="holds no run"):
        find_resumption(config)
    save_some(config, FakeLearner(), [])
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        find_resumption(config)
    StepDirs(config.run.dir / "checkpoints").start(4)
    with pytest.raises(UserError, match=r"only step-000004\.part, which was not written"):
        find_resumption(config)


def test_the_run_directory_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    run_dir = config.run.dir
    lines = [json.dumps({"update": update}) + "\n" for update in range(4)]
    (run_dir / "metrics.jsonl").write_text("".join(lines) + '{"update": 4, "lo')
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "learner.log").write_text("first")
    (run_dir / "summary.json").write_text("{}")
    (run_dir / "notes.txt").write_text("the user's")
    reopen_run_dir(config, 2)
    assert (run_dir / "metrics.jsonl").read_text() == "".join(lines[:2])
    assert (run_dir / "earlier" / "1" / "logs" / "learner.log").read_text() == "first"
    assert not (run_dir / "summary.json").exists()
    assert list((run_dir / "logs").iterdir()) == []
    assert (run_dir / "notes.txt").exists()
    reopen_run_dir(config, 2)
    assert (run_dir / "earlier" / "2" / "logs").is_dir()
    assert NOTHING_YET.line == []


@pytest.mark.parametrize(
    "row", [b"{\n", b"[1]\n", b"\xff\n", b'{"loss": 1}\n', b'{"update": null}\n']
)
def test_a_damaged_row_is_named_and_nothing_is_moved(tmp_path: Path, row: bytes) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    content = b'{"update": 0}\n' + row
    (config.run.dir / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is damaged"):
        reopen_run_dir(config, 2)
    assert (config.run.dir / "metrics.jsonl").read_bytes() == content
    assert not (config.run.dir / "earlier").exists()


def test_earlier_attempts_may_be_removed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    reopen_run_dir(config, 2)
    reopen_run_dir(config, 2)
    (config.run.dir / "earlier" / "1").rmdir()
    reopen_run_dir(config, 2)
    assert (config.run.dir / "earlier" / "3").is_dir()


def test_sums_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "b").write_bytes(b"")
    write_sums(tmp_path, 0, ["a"])
    write_sums(tmp_path, 1, ["b"])
    entries = read_sums(tmp_path, 2)
    assert entries == [sum_file(tmp_path, "a"), sum_file(tmp_path, "b")]
    assert [entry.size for entry in entries] == [10, 0]
    with pytest.raises(ValueError, match=sums_name(2)):
        read_sums(tmp_path, 3)
    for rows in ("5", "[5]", '[["a", 1]]', "[[1, 2, 3]]", "[" * 100_000):
        (tmp_path / sums_name(2)).write_text(rows)
        with pytest.raises(ValueError, match=f"cannot read {sums_name(2)}"):
            read_sums(tmp_path, 3)
    (tmp_path / "a").unlink()
    with pytest.raises(ValueError, match="a must have 10 bytes, it is missing"):
        check_size(tmp_path, entries[0])


@pytest.mark.parametrize("key", ["updates", "step", "world_size"])
@pytest.mark.parametrize("value", ["2", None, -1, 2.0])
def test_what_a_learner_says_of_itself_are_counts(tmp_path: Path, key: str, value: Any) -> None:
    facts = {"format": 2, "updates": 2, "step": 2, "world_size": 1, "parallel": {}, "dtype": "x"}
    (tmp_path / "state.json").write_text(json.dumps(facts))
    assert read_facts(tmp_path).updates == 2
    (tmp_path / "state.json").write_text(json.dumps(facts | {key: value}))
    least = 1 if key == "world_size" else 0
    with pytest.raises(ValueError, match=f"{key} of state.json must be >= {least}, got "):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        *(["../a", 1, 2], ["/a", 1, 2], ["", 1, 2], ["a\x1b[2J", 1, 2], ["b" * 300, 1, 2]),
        *(["a", True, 2], ["a", 1, -2], ["a", 1.0, 2], ["a", 1], 3, ["a" * 5000, {}, 2]),
    ],
)
def test_checksums_are_of_files_in_the_checkpoint(tmp_path: Path, row: Any):
    """Before: files elsewhere, true as a size, escape codes and 5,000 characters in the line."""
    (tmp_path / "sums-00000.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match="not a file name in it, a size and a checksum") as told:
        read_sums(tmp_path, 1)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 1000
