"""Whatever happens while a version is written, the one before it can be read, and goes in time."""

import errno
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_opd.weight_sync import disk_writer
from megatron_opd.weight_sync.disk_messages import DiskRefused, Open, Write, Written, decode, encode
from megatron_opd.weight_sync.disk_writer import DiskWriter
from sglang_bridge.server.version_files import BadVersion
from sglang_bridge.weights import manifest as manifests
from sglang_bridge.weights.manifest import MANIFEST, Manifest, version_name
from tests.support.config_files import minimal
from tests.support.disk import (
    RUN,
    SHAPES,
    Tensors,
    differing,
    hold_whole,
    lone_learner,
    pieces_of,
    random_tensors,
    randomly_changed,
    reader_of,
)

WHOLE = {name: [(0, shape[0 if name != "b" else 1])] for name, shape in SHAPES.items()}
OPERATIONS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "fsync",
)
_before: list[Callable[[], None]] = []  # what happens before a file operation below the directory


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _before or event not in OPERATIONS:
        return
    if event in ("fsync", "os.remove", "os.rmdir") or RUN in str(arguments[0]):
        _before[0]()


sys.addaudithook(_audit)


class Learner:
    """One rank whose weights change at random; what each version held."""

    def __init__(self, monkeypatch: Any, root: Path, **settings: Any) -> None:
        self.root, self.rng = root, random.Random(3)
        self.live = random_tensors(self.rng, torch.bfloat16)
        self.held: dict[str, Tensors] = {}
        self.full = lone_learner(self.live)
        hold_whole(monkeypatch, self.live)
        sync = {"type": "disk", "directory": str(root), "delta": True, "full_every": 4} | settings
        self.config = minimal(weight_sync=sync)
        self.writer = DiskWriter(self.full, self.config)
        self.opened = self.ask(Open(RUN, "me", "bfloat16"))
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (sys.audit("fsync"), real(fd))[1])

    def ask(self, request: Any) -> Any:
        return decode(self.writer.handle(encode(request)))

    def change(self) -> None:
        for name, other in randomly_changed(self.rng, self.live, 0.05).items():
            self.live[name].copy_(other)

    def write(self, step: int, *, whole: bool = False, taken: str | None = None) -> Any:
        self.change()
        name = version_name(step, step)
        answer = self.ask(Write(name, step, whole, taken))
        if isinstance(answer, Written):
            self.held[name] = {key: value.clone() for key, value in self.live.items()}
        return answer

    def on_disk(self) -> set[str]:
        return {entry.name for entry in (self.root / RUN).iterdir()} - {"owner"}

    def read(self, name: str) -> list[str]:
        """Names of what differs in a rank that knows nothing yet."""
        held = pieces_of(0, WHOLE, torch.bfloat16)
        reader_of(held, self.root).take(name)
        return differing(held, self.held[name])

    def is_whole(self, name: str) -> bool:
        return manifest(self.root / RUN / name).base is None


def manifest(version: Path) -> Manifest:
    return manifests.decode((version / MANIFEST).read_bytes(), version.name)


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("delta", [True, False])
def test_old_versions_go_and_every_kept_one_can_be_read(
    monkeypatch: Any, tmp_path: Path, keep: int, delta: bool
):
    learner = Learner(monkeypatch, tmp_path / "w", keep_versions=keep, delta=delta)
    assert learner.opened == Written(0)
    taken = None
    for step in range(14):
        answer = learner.write(step, whole=step == 0, taken=taken)
        assert isinstance(answer, Written)
        names = sorted(learner.held)
        newest = names[-keep - 1 :]
        assert learner.on_disk() >= set(newest)
        # a fleet that is behind keeps one more, and a chain its whole version
        assert len(learner.on_disk()) <= max(keep, 2) + 1 + (3 if delta else 0)
        for name in newest:
            assert learner.read(name) == []
        if step % 3:  # else a fleet that takes this version later
            taken = names[-1]


def test_one_of_full_every_versions_is_whole(monkeypatch: Any, tmp_path: Path):
    learner = Learner(monkeypatch, tmp_path / "w", keep_versions=20)
    for step in range(9):
        learner.write(step, whole=step == 0)
    learner.write(9, whole=True)
    learner.write(10)
    whole = [learner.is_whole(name) for name in sorted(learner.on_disk())]
    assert [step for step, each in enumerate(whole) if each] == [0, 4, 8, 9]


def test_nothing_that_no_server_took_is_deleted(monkeypatch: Any, tmp_path: Path):
    learner = Learner(monkeypatch, tmp_path / "w", keep_versions=1)
    for step in range(5):
        learner.write(step, whole=True, taken=version_name(1, 1) if step > 1 else None)
    assert learner.on_disk() == {version_name(step, step) for step in range(1, 5)}


def before_operation(number: int, act: Callable[[], None]) -> None:
    """Let `act` happen before file operation `number` from now on, once, and never if negative."""
    left = iter(range(number, -1, -1))
    _before[:] = [lambda: act() if next(left, None) == 0 else None]


def fail_with(number: int) -> None:
    raise OSError(number, os.strerror(number))


def operations(learner: Learner, act: Callable[[], Any]) -> int:
    """How many file operations `act` takes."""
    seen: list[None] = []
    _before[:] = [lambda: seen.append(None)]
    try:
        act()
    finally:
        _before.clear()
    return len(seen)


def test_a_writer_killed_at_any_file_operation_leaves_the_last_version(
    monkeypatch: Any, tmp_path: Path
):
    learner = Learner(monkeypatch, tmp_path / "w", keep_versions=1)
    taken = None
    for step in range(3):
        learner.write(step, whole=step == 0, taken=taken)
        taken = version_name(step, step)
    assert taken is not None
    learner.change()
    ended_at = -1
    for at in range(200):
        pid = os.fork()
        if pid == 0:
            before_operation(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            answer = learner.ask(Write(version_name(3, 3), 3, True, taken))
            os._exit(0 if isinstance(answer, Written) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert learner.read(taken) == [], at
        named = version_name(3, 3) in learner.on_disk()
        if named:
            learner.held[version_name(3, 3)] = learner.live
            assert learner.read(version_name(3, 3)) == [], at
            shutil.rmtree(learner.root / RUN / version_name(3, 3))
        assert status in (0, -signal.SIGKILL)
        if status == 0:
            assert named
            ended_at = at
            break
    assert ended_at > 15, "operations"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_failure_at_any_file_operation_is_told_and_the_next_version_is_whole(
    monkeypatch: Any, tmp_path: Path, number: int
):
    learner = Learner(monkeypatch, tmp_path / "w", keep_versions=1)
    learner.write(0, whole=True)
    learner.write(1, whole=True)
    last, step, told = version_name(1, 1), 2, 0
    count = operations(learner, lambda: learner.write(2, taken=last))
    last = version_name(2, 2)
    assert count > 15
    for at in range(count):
        step += 1
        before_operation(at, lambda: fail_with(number))
        try:
            answer = learner.write(step, taken=last)
        finally:
            _before.clear()
        assert learner.read(last) == [], at
        if isinstance(answer, DiskRefused):
            told += 1
            assert str(tmp_path) in answer.cause
            assert "weight_sync.directory" in answer.cause
            assert "\n" not in answer.cause
            assert ("disk full" in answer.cause) == (number == errno.ENOSPC)
        step += 1
        assert isinstance(learner.write(step, taken=last), Written)
        last = version_name(step, step)
        assert learner.is_whole(last) == isinstance(answer, DiskRefused)
        assert learner.read(last) == []
    assert told >= count - 9  # what is only in the way of a deletion goes the next time


def test_a_file_that_grows_too_large_is_told(monkeypatch: Any, tmp_path: Path):
    """The system itself refuses the bytes in the midst of a file."""
    import resource

    learner = Learner(monkeypatch, tmp_path / "w")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        answer = learner.write(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert isinstance(answer, DiskRefused)
    assert "rank00000.safetensors: file too large: weight_sync.directory must be" in answer.cause
    assert learner.on_disk() == set()
    assert isinstance(learner.write(1), Written)


def test_what_an_earlier_try_of_the_same_run_left_is_removed_and_nothing_else(
    monkeypatch: Any, tmp_path: Path
):
    root = tmp_path / "w"
    old, others = root / "run-aaaaaaaaaaaa", root / "run-bbbbbbbbbbbb"
    mine = root / "my results"
    for path, owner in ((old, "me"), (others, "somebody"), (mine, "me")):
        (path / version_name(0, 0)).mkdir(parents=True)
        (path / "owner").write_text(owner)
    (root / "run-cccccccccccc").symlink_to(mine)
    learner = Learner(monkeypatch, root)
    assert {entry.name for entry in root.iterdir()} == {
        RUN,
        others.name,
        mine.name,
        "run-cccccccccccc",
    }
    (root / RUN / "notes.txt").write_text("mine")
    learner.write(0)
    learner.write(1, taken=version_name(0, 0))
    assert "notes.txt" in learner.on_disk()
    (root / RUN / "notes.txt").unlink()
    learner.writer.close()
    learner.writer.close()
    assert not (root / RUN).exists()
    assert others.exists()


def test_a_directory_that_cannot_be_made_is_named(monkeypatch: Any, tmp_path: Path):
    (tmp_path / "file").write_text("")
    missing = Learner(monkeypatch, tmp_path / "no" / "such")
    assert isinstance(missing.opened, DiskRefused)
    assert missing.opened.cause.startswith(f"{tmp_path}/no/such: no such file or directory: weight")
    file = Learner(monkeypatch, tmp_path / "file")
    assert isinstance(file.opened, DiskRefused)
    assert file.opened.cause.startswith(f"{tmp_path}/file: file exists: weight_sync.directory must")


def test_a_rank_that_does_not_see_the_directory_is_named(monkeypatch: Any, tmp_path: Path):
    monkeypatch.setattr(disk_writer, "SHOWN_S", 0.0)
    monkeypatch.setattr(disk_writer.Stream, "make", lambda *_: None)
    hidden = Learner(monkeypatch, tmp_path / "w").opened
    assert isinstance(hidden, DiskRefused)
    assert "is not there on rank 0: weight_sync.directory must be one directory" in hidden.cause


def test_nothing_is_written_before_it_is_opened(monkeypatch: Any, tmp_path: Path):
    learner = Learner(monkeypatch, tmp_path / "w")
    learner.writer = DiskWriter(learner.full, learner.config)
    answer = learner.write(0)
    assert isinstance(answer, DiskRefused)
    with pytest.raises(TypeError, match="an answer of the learner is no request"):
        learner.ask(Written(0))
    with pytest.raises(BadVersion):
        reader_of(pieces_of(0, WHOLE, torch.bfloat16), tmp_path / "w").take(version_name(0, 0))
