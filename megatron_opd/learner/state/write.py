"""Writes the shards of a Megatron distributed checkpoint, at once or in the background.

Invariant: what is written is the state at the call of `save`; later updates do not reach it. Files
are fsynced before `done` is called, and `done` is called on a rank only when every rank has written
its share.

Megatron's own writer forks a process per file and starts a manager process for their results, which
imports the whole program again. This one writes the same format (torch_dist) with torch's writer on
a thread, over a process group of its own, so that its collectives never meet those of training.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,  # pyright: ignore[reportPrivateUsage]
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from megatron_opd.checkpoint.run_lock import NotTheHolder

BACKEND, VERSION = "torch_dist", 1


class SaveFailed(RuntimeError):
    """Reports in one line that a checkpoint could not be written."""


class ShardWriter(TorchDistSaveShardedStrategy):
    """Implements Megatron's save strategy; one save at a time.

    timeout_s: longest that a rank waits for the others while they write.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__(BACKEND, VERSION)
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._in_background = False
        self._done: Callable[[], None] = lambda: None

    def prepare(self, done: Callable[[], None], *, in_background: bool) -> None:
        """Say what follows the next save, and whether it may return before it is written."""
        self._done, self._in_background = done, in_background

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save for Megatron. Returns when the state is copied or written, as prepared."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        if self._in_background:
            _detach_from_training(flat)
        state = mcore_to_pyt_state_dict(flat, False)
        if not self._in_background:
            self._write(state, Path(checkpoint_dir))
            return
        self._thread = threading.Thread(
            target=self._write_behind, args=(state, Path(checkpoint_dir)), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save is written. Raises what it failed with, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_behind(self, state: dict[str, Any], path: Path) -> None:
        try:
            self._write(state, path)
        except BaseException as error:  # noqa: BLE001  raised by the next `wait`
            self._failure = error
            if isinstance(error, NotTheHolder):
                return  # the directory is another run's: not even a reason is written into it
            reason = str(error) if isinstance(error, SaveFailed) else _safely_explained(error, path)
            try:
                # on a full disk the name is all that can be written
                (path / f"failed-{dist.get_rank():05d}").write_text(reason, encoding="utf-8")
            except OSError as unwritten:
                sys.stderr.write(f"{path}: {reason}; not written there: {unwritten.strerror}\n")

    def _write(self, state: dict[str, Any], path: Path) -> None:
        try:
            save_shards(
                state,
                storage_writer=FileSystemWriter(path, single_file_per_rank=True, sync_files=True),
                planner=MCoreSavePlanner(flatten_state_dict=False),
                process_group=self._group,
            )
        except CheckpointException as failed:  # a BaseException: `except Exception` misses it
            raise SaveFailed(explained(failed, path)) from failed
        self._done()


def explained(error: BaseException, path: Path) -> str:
    """Return the error in one line with the free space: torch reports a full disk obscurely."""
    free_mb = shutil.disk_usage(path).free / 1e6
    return f"{one_line(error)} ({free_mb:.1f} MB are free there)"


def _safely_explained(error: BaseException, path: Path) -> str:
    try:
        return explained(error, path)
    except OSError:  # the directory is gone
        return one_line(error)


def one_line(error: BaseException) -> str:
    """Return what happened; of torch's errors of all ranks the lowest rank's, without traceback."""
    if isinstance(error, CheckpointException):
        error = min(error.failures.items(), key=lambda failure: failure[0])[1][0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


def _detach_from_training(shards_by_key: dict[str, list[Any]]) -> None:
    """Replace the data of every sharded tensor by a copy in host memory."""
    for shards in shards_by_key.values():
        for shard in shards:
            if isinstance(shard, ShardedTensor) and shard.data is not None:
                data = shard.data.detach()
                shard.data = data.clone() if data.device.type == "cpu" else data.cpu()
