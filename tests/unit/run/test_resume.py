"""What a run goes on from, and what may change."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.checkpoint.state_files import sum_file
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import NOTHING_YET
from megatron_opd.data.file_sums import FileDifference
from megatron_opd.errors import UserError
from megatron_opd.run.checkpoints import RUN
from megatron_opd.run.resume import Change, find_resumption, reopen_run_dir
from tests.support.kept_states import FakeLearner, at, make_config, save_some


def test_what_a_run_kept_must_be_whole(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    for key in ("data", "totals", "elapsed_s", "evaluations", "template"):
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
        student={
            "servers": 2,
            "gpus": [0, 3],
            "base_port": 30000,
            "api_key_env": "OPD_STUDENT_KEY",
        },
        learner={"parallel": {"tp": 2}, "threads": 3, "gpus": [1, 2]},
        cluster={"share_gpus": True},
        evaluation={"problems": 1},
        scoring={"guard": "warn", "guard_stop_after": 0},
        rollout={"concurrency": 3},
    )
    assert find_resumption(harmless).state == asyncio.run(at(2))
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
        find_resumption(make_config(tmp_path, run={"max_steps": 1}))


def test_rows_may_be_added_and_other_changes_of_the_data_must_be_accepted(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    with pytest.raises(UserError, match=r"--accept-changes: data\.train has not changed"):
        find_resumption(config, ["data.train"])
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n')
    found = find_resumption(config)
    assert found.begun.differences == (FileDifference.GROWN,)
    assert found.changes == ()
    file.write_text('{"prompt": "2+1="}\n')
    with pytest.raises(UserError, match=r"train\.jsonl has changed since .* --accept-changes data"):
        find_resumption(config)
    found = find_resumption(config, ["data.train"])
    assert found.begun.differences == (FileDifference.CHANGED,)
    (change,) = found.changes
    assert change.line.startswith('resumed at 2 updates with data.train changed from [["19 bytes')
    assert change.line in found.notes
    # what a process has in memory is not read again
    assert find_resumption(config, data_in_memory=True).begun.differences == (FileDifference.NONE,)
    file.unlink()
    with pytest.raises(UserError, match=r"--resume: data\.train: data file not found"):
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
    (run_dir / "rollouts.jsonl").write_text("".join(lines * 2) + '{"update": 4, "ui')
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "learner.log").write_text("first")
    (run_dir / "summary.json").write_text("{}")
    (run_dir / "notes.txt").write_text("the user's")
    reopen_run_dir(config, 2)
    assert (run_dir / "metrics.jsonl").read_text() == "".join(lines[:2])
    assert (run_dir / "rollouts.jsonl").read_text() == "".join(lines[:2] * 2)
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


def test_a_rollback_in_the_same_process_cuts_both_files_of_rows(tmp_path: Path) -> None:
    lines = [json.dumps({"update": update}) + "\n" for update in range(4)]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "trace.json").write_text("[")
    RunDir(tmp_path).rewind(3, "")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (tmp_path / name).read_text() == "".join(lines[:3])
    assert (tmp_path / "earlier" / "1" / "trace.json").exists()


def test_earlier_attempts_may_be_removed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    reopen_run_dir(config, 2)
    reopen_run_dir(config, 2)
    (config.run.dir / "earlier" / "1").rmdir()
    reopen_run_dir(config, 2)
    assert (config.run.dir / "earlier" / "3").is_dir()


def test_the_rows_of_evaluations_are_those_that_the_checkpoint_knows(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    rows = config.run.dir / "evaluations.jsonl"
    run_dir = reopen_run_dir(config, 2)
    assert not rows.exists(), "there was none"
    rows.write_text('{"update": 4}\n{"upd')
    reopen_run_dir(config, 2, evaluations='{"update": 2}\n')
    assert rows.read_text() == '{"update": 2}\n'
    run_dir.rewind(1, "")
    assert rows.read_text() == ""


@pytest.mark.parametrize("key", ["evaluations", "template", "data"])
def test_damaged_evaluations_and_templates_are_named(tmp_path: Path, key: str) -> None:
    config = make_config(tmp_path)
    save_some(config, FakeLearner(), [2])
    step = config.run.dir / "checkpoints" / "step-000002"
    extras = json.loads((step / RUN).read_text())
    extras[key] |= {"pending": "none", "clock": "none", "sums": "none"}
    (step / RUN).write_text(json.dumps(extras))
    manifest = json.loads((step / "manifest.json").read_text())
    found = sum_file(step, RUN)
    manifest["sizes"][RUN], manifest["crc32"][RUN] = found.size, found.crc32
    (step / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UserError, match=r"totals, evaluations, template or data of run\.json are damaged"
    ):
        find_resumption(config)


def test_a_run_whose_data_was_used_up_needs_more_epochs(tmp_path: Path) -> None:
    config = make_config(tmp_path, data={"epochs": 1})
    save_some(config, FakeLearner(), [2, 4])
    summary = config.run.dir / "summary.json"
    summary.write_text(json.dumps({"status": "finished", "updates": 4}))
    with pytest.raises(UserError, match=r"data\.epochs must be above 1.*used up after 4 updates"):
        find_resumption(config)
    assert find_resumption(make_config(tmp_path, data={"epochs": 2})).state.updates == 4
    # one that was killed has prompts left, whatever it was told
    summary.write_text(json.dumps({"status": "failed", "updates": 4}))
    assert find_resumption(config).state.updates == 4


def test_a_run_that_made_all_its_updates_goes_on_with_more_of_them(tmp_path: Path) -> None:
    config = make_config(tmp_path, run={"max_steps": 4})
    save_some(config, FakeLearner(), [4])
    summary = config.run.dir / "summary.json"
    summary.write_text(json.dumps({"status": "finished", "updates": 4}))
    more = make_config(tmp_path, run={"max_steps": 8})
    assert find_resumption(more).state.updates == 4
