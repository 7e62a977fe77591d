"""A disk that fills up: what was written stays whole, one line says so, the summary survives."""

import asyncio
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_opd.checkpoint.run_dir import prepare_run_dir
from megatron_opd.metrics.observers import Observers
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.sinks import JsonlSink, reserve_json, write_json
from megatron_opd.metrics.tensorboard import TensorBoardSink
from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.metrics.types import Accounting
from tests.support.kept_states import FakeLearner, at, make_config

FULL = f"{os.strerror(errno.ENOSPC)}|{os.strerror(errno.EFBIG)}"
ROW = {"update": 0, "loss": 0.25, "note": "x" * 40}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size` bytes: as on a full disk, a write is short or fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_rows_are_there_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    with files_of_at_most(200):
        sink.write(0, ROW)
        with pytest.raises(OSError, match=FULL):
            sink.write(1, ROW | {"note": "x" * 200})
        sink.write(1, ROW | {"update": 1})
        sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["update"] for row in rows] == [0, 1]
    later = JsonlSink(path)
    later.write(9, ROW | {"update": 9})
    later.close()
    assert json.loads(path.read_text().splitlines()[-1])["update"] == 9


PROGRAM = """
import resource, sys
from pathlib import Path
from megatron_opd.metrics.tensorboard import TensorBoardSink
sink = TensorBoardSink(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
try:
    for update in range(99):
        sink.write(update, {"loss": 0.5})
except OSError as error:
    print(error.strerror)
sink.close()
"""


def test_tensorboard_prints_no_traceback_of_its_own(tmp_path: Path):
    """Before: its thread printed `Traceback (most recent call last)` on the terminal."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0
    assert done.stdout.strip() in FULL.split("|")


def test_tensorboard_reads_what_was_written(tmp_path: Path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoardSink(tmp_path)
    sink.write(3, {"loss": 0.5, "unix_time_s": 12.0, "note": "x"})
    sink.close()
    (file,) = tmp_path.glob("events.*")
    first, second = EventFileLoader(str(file)).Load()
    assert first.file_version == "brain.Event:2"
    assert (second.step, second.wall_time) == (3, 12.0)
    assert second.summary.value[0].tag == "train/loss"


def test_the_summary_has_its_space_from_the_start(tmp_path: Path):
    path = tmp_path / "summary.json"
    with files_of_at_most(0), pytest.raises(OSError, match=FULL):
        write_json(path, {"status": "failed"})
    reserve_json(path)
    full = tmp_path.with_name(f"{tmp_path.name}-full")
    with files_of_at_most(0), pytest.raises(OSError, match=FULL):
        full.write_bytes(b"x")
    reserved = next(tmp_path.glob(".summary.json.reserved"))
    with pytest.MonkeyPatch.context() as patch:  # no block is free: only what is ours is written

        def no_space(self: Path, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(Path, "write_bytes", no_space)
        write_json(path, {"status": "failed", "updates": 3})
    assert json.loads(path.read_text()) == {"status": "failed", "updates": 3}
    assert not reserved.exists()
    reserve_json(path)
    write_json(path, {"status": "finished"})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["summary.json"]


def test_a_new_run_reserves_it(tmp_path: Path):
    config = make_config(tmp_path)
    run_dir = prepare_run_dir(config.run.dir, config)
    assert (run_dir.path / ".summary.json.reserved").stat().st_size > 10_000


def test_one_full_file_does_not_keep_the_others_open(tmp_path: Path):
    class Full:
        def write(self, update: int, row: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def evaluated(self, row: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    trace, rows = tmp_path / "trace.json", JsonlSink(tmp_path / "metrics.jsonl")
    timeline = Timeline(TraceWriter(trace, 0.0), ["e"])
    observers = Observers([timeline, RunRecorder(RunTotals(["e"], 1), [Full(), rows])])
    observers.ended(Accounting(0, 0, 0, 0, {}, 0, False), 1.0)
    with pytest.raises(OSError, match="No space left"):
        observers.close()
    assert json.loads(trace.read_text())
    assert rows._file._file.closed


def test_a_checkpoint_that_fails_while_the_run_ends_says_nothing(tmp_path: Path):
    """Before: `Task exception was never retrieved` and a traceback on the terminal."""
    from megatron_opd.checkpoint.state_dirs import StepDirs
    from megatron_opd.run.checkpoints import Checkpoints

    config = make_config(tmp_path)
    said: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        learner = FakeLearner(fail="OSError: No space left on device")
        dirs = StepDirs(config.run.dir / "checkpoints")
        kept = Checkpoints(dirs, config, learner, dict, lambda line: None)
        await kept.after_update(2, lambda: at(2))
        await asyncio.sleep(0.5)  # it fails behind the run's back
        await kept.abandon()
        del kept

    asyncio.run(main())
    import gc

    gc.collect()
    assert said == []
