"""A run directory has one owner, and only who belongs to it writes there."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_opd.checkpoint.export import export_hf
from megatron_opd.checkpoint.run_lock import (
    LOCK,
    LockClaim,
    NotTheHolder,
    RunDirHeld,
    RunLock,
    read_holder,
    refuse_if_held,
)
from tests.support.cli_cases import call, refused, small_config, tiny_models

HOLDS = """
import sys, time
from pathlib import Path
from megatron_opd.checkpoint.run_lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds tmp_path / "run" and has written a run's products into it."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", HOLDS, str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    (run_dir / "config.resolved.yaml").write_text("run: {}\n")
    (run_dir / "metrics.jsonl").write_text('{"update": 0}\n')
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("verb", ["run", "control"])
@pytest.mark.parametrize("option", [None, "--overwrite", "--resume"])
def test_a_live_run_is_left_alone(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    live_run: subprocess.Popen[str],
    verb: str,
    option: str | None,
):
    """Before: --overwrite deleted its metrics, --resume cut them, and both runs went on."""
    run_dir = tmp_path / "run"
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    config = small_config(tmp_path, tiny_models(tmp_path / "models"))
    capsys.readouterr()
    if verb == "control":
        config["learner"] = {"listen_port": 29_000}
        for port, role in enumerate(("student", "teacher"), 9):
            config[role]["urls"] = [f"http://127.0.0.1:{port}"]
    started = time.strftime("%Y-%m-%d")
    code = call(tmp_path, config, *([option] if option else []), verb=verb)
    refused(capsys, code, "run.dir", f"pid {live_run.pid} on ", f"started {started}", "stop that")
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before


def test_a_killed_holder_holds_nobody_up(tmp_path: Path, live_run: subprocess.Popen[str]):
    run_dir = tmp_path / "run"
    with pytest.raises(RunDirHeld):
        refuse_if_held(run_dir)
    live_run.kill()
    live_run.wait()
    assert (run_dir / LOCK).exists()
    refuse_if_held(run_dir)
    with RunLock.take(run_dir) as lock:
        held = read_holder(run_dir / LOCK)
        assert held == lock.holder
        assert held.pid == os.getpid()
        assert (run_dir / LOCK).stat().st_mode & 0o077 == 0, "the token is its user's alone"
    assert not (run_dir / LOCK).exists()


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path):
    lock = RunLock.take(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.close(lock._handle)  # as the kernel does at the end of a process
        with RunLock.take(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_what_was_made_for_the_lock_goes_with_it_unless_something_lies_there(tmp_path: Path):
    deep = tmp_path / "a" / "b"
    RunLock.take(deep).release()
    assert list(tmp_path.iterdir()) == []
    lock = RunLock.take(deep)
    (deep / "metrics.jsonl").touch()
    lock.release()
    lock.release()
    assert [path.name for path in deep.iterdir()] == ["metrics.jsonl"]


def test_a_writer_of_an_earlier_run_is_refused(tmp_path: Path):
    with RunLock.take(tmp_path) as first:
        first.claim.check()
    with pytest.raises(NotTheHolder, match=r"the same run\.dir"):
        first.claim.check()
    with RunLock.take(tmp_path) as second:
        second.claim.check()
        with pytest.raises(NotTheHolder, match=f"now belongs to pid {os.getpid()} on "):
            first.claim.check()
        with pytest.raises(NotTheHolder, match=r"must see the same run\.dir"):
            LockClaim(tmp_path / "elsewhere" / LOCK, second.claim.token).check()


def test_an_export_is_not_named_once_the_directory_is_anothers(dense: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    earlier = RunLock.take(run_dir)
    earlier.release()
    target = run_dir / "checkpoints" / "final"
    tensors = load_file(dense / "model.safetensors").items()
    with RunLock.take(run_dir), pytest.raises(NotTheHolder):
        export_hf(tensors, dense, target, torch.float32, may_name=earlier.claim.check)
    assert list(target.parent.iterdir()) == []


def lock_file(**changes: object) -> bytes:
    held = {"pid": 9, "host": "a", "started": "2026-01-02 03:04:05 +0000", "token": "ab" * 32}
    return json.dumps(held | changes).encode()


UNREADABLE = [b"", b"[]", b"{}", b"\xff", b'{"pid": []}', b"[" * 100_000]
# before: OverflowError, TypeError (of compare_digest), escape codes on the terminal, and holders
UNREADABLE += [
    lock_file(**{key: value})
    for key, values in {
        "pid": (float("inf"), 1.5, "9", True, 0),
        "host": ("\x1b[2J", "a" * 5000, 3),
        "started": ("\n", {"a": 1}),
        "token": ("é" * 32, "ab", [], "zz" * 32),
    }.items()
    for value in values
]


@pytest.mark.parametrize("content", UNREADABLE)
def test_an_unreadable_lock_file_names_nobody(tmp_path: Path, content: bytes):
    (tmp_path / LOCK).write_bytes(content)
    assert read_holder(tmp_path / LOCK) is None
    with pytest.raises(NotTheHolder):
        LockClaim(tmp_path / LOCK, "ab" * 32).check()
    with RunLock.take(tmp_path):
        (tmp_path / LOCK).write_bytes(content)
        with pytest.raises(RunDirHeld, match="is held by another process"):
            RunLock.take(tmp_path)


def test_the_token_is_for_its_user_alone_whatever_file_was_there(tmp_path: Path):
    """Before: a copied run's lock, readable by all, received the token as it was."""
    left = tmp_path / LOCK
    left.write_text("{}")
    left.chmod(0o666)
    with RunLock.take(tmp_path):
        assert left.stat().st_mode & 0o777 == 0o600


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path):
    """Before: the file that it names was emptied, and the token written into it."""
    precious = tmp_path / "precious"
    precious.write_text("work of a year")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / LOCK).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        RunLock.take(run_dir)
    assert precious.read_text() == "work of a year"
