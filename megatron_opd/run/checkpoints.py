"""Writes a run's checkpoints while it trains: the learner's part, the controller's, then the name.

    snapshot (at once) -> learner copies its state -> training continues
                                                   -> every rank's shards written -> manifest, name

Implements controller.ports.Keeper. At most one checkpoint is being written; the next one waits for
it. A failure to write stops the run, at the next checkpoint or at the end: a run that silently goes
on without checkpoints would lose everything later.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.checkpoint.run_lock import LockClaim, NotTheHolder
from megatron_opd.checkpoint.state_dirs import LEARNER, StepDirs
from megatron_opd.checkpoint.state_files import sums_name
from megatron_opd.config.schema import Config
from megatron_opd.controller.ports import TakeState
from megatron_opd.controller.snapshot_codec import encode_state
from megatron_opd.errors import CheckpointFailed
from megatron_opd.metrics.types import Mean

CONTROLLER, RUN = "controller.msgpack", "run.json"
POLL_S = 0.1


class KeptEvaluations(Protocol):
    """Names what checkpoint.keep_best asks of evaluation.evaluations.Evaluations."""

    @property
    def wanted(self) -> frozenset[int]:
        """Returns the updates whose checkpoints are the best one, or may turn out to be."""
        ...

    def falls_on(self, updates: int) -> bool:
        """Return whether the weights after these updates are evaluated."""
        ...


class SavingLearner(Protocol):
    """Names the methods of transport.zmq.RemoteLearner that checkpoints need."""

    async def save_state(self, path: Path, updates: int, *, in_background: bool) -> None:
        """Write the learner's state, or copy it to be written."""
        ...


class Checkpoints:
    """Writes checkpoints as often as configured, and removes those that are too old.

    Args:
        dirs: where they go.
        config: how often, how many, how large the learner's world is.
        learner: what is saved.
        extras: what else must be kept of the run (JSON), taken together with the controller's
            state.
        say: tells the user.
        claim: proves, before anything is written or named, that the directory is still this run's.
        updates: of the checkpoint that the run continues from.
        evaluations: what checkpoint.keep_best asks which checkpoints to write and keep.
    """

    def __init__(
        self,
        dirs: StepDirs,
        config: Config,
        learner: SavingLearner,
        extras: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
        claim: LockClaim | None = None,
        updates: int = 0,
        evaluations: KeptEvaluations | None = None,
    ) -> None:
        self._dirs, self._config, self._learner = dirs, config.checkpoint, learner
        self._ranks = config.learner.parallel.world_size
        self._timeout_s = config.learner.timeout_s
        self._extras, self._say = extras, say
        self._claim = claim
        self._evaluations = evaluations if config.checkpoint.keep_best else None
        self._last_s = time.monotonic()
        self._newest = updates
        self._writing: list[asyncio.Task[None]] = []
        """The checkpoint being written, if there is one."""
        self.waited_s = Mean()
        """Seconds that training waited for a checkpoint."""
        self.written_s = Mean()
        """Seconds from the snapshot to the checkpoint's name."""

    async def after_update(self, updates: int, state: TakeState) -> None:
        """Save a checkpoint. Raises CheckpointFailed, also for the previous checkpoint."""
        started_s = self._last_s = time.monotonic()
        run = json.dumps(self._extras())
        kept = await state()
        # records that nothing changes: the loops go on while 2 MiB a waiting sample are copied
        controller = await asyncio.to_thread(encode_state, kept)
        await self.finish()
        self._check_claim()
        part = self._dirs.start(updates)
        in_background = self._config.async_save
        await self._learner.save_state(part / LEARNER, updates, in_background=in_background)
        self._newest = updates
        complete = self._complete(part, updates, controller, run, started_s)
        self._writing.append(asyncio.create_task(complete, name=f"checkpoint {updates}"))
        if not in_background:
            await self.finish()
        self.waited_s.add(time.monotonic() - started_s)

    async def at_end(self, updates: int, state: TakeState) -> None:
        """Save a checkpoint of a run that ends early, and wait for it.

        None where none are written at all, and where there is one of these updates.
        """
        if self._config.writes and updates > self._newest:
            await self.after_update(updates, state)
        await self.finish()

    def due(self, updates: int) -> bool:
        """Return whether a checkpoint is due by count, for an evaluation, or by time.

        Saving changes no update.
        """
        every, minutes = self._config.every, self._config.every_minutes
        by_count = every > 0 and updates % every == 0
        evaluated = self._evaluations is not None and self._evaluations.falls_on(updates)
        return (
            by_count
            or evaluated
            or (minutes > 0 and time.monotonic() - self._last_s >= 60 * minutes)
        )

    async def abandon(self) -> None:
        """Drop the checkpoint being written, because the run ends for another reason."""
        while self._writing:
            writing = self._writing.pop()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def finish(self) -> None:
        """Wait until the checkpoint being written is complete."""
        while self._writing:
            await self._writing.pop()

    async def _complete(
        self, part: Path, updates: int, controller: bytes, run: str, started_s: float
    ) -> None:
        await asyncio.to_thread(_write_own, part, controller, run)
        await self._learner_written(part / LEARNER)
        self._check_claim()
        await asyncio.to_thread(self._dirs.publish, updates, [CONTROLLER, RUN])
        await self.rotate()
        self.written_s.add(time.monotonic() - started_s)
        self._say(f"checkpoint: {self._dirs.path(updates)}")

    async def rotate(self) -> None:
        """Remove the checkpoints that are neither among the newest nor the best ones."""
        keep_last, keep_every = self._config.keep_last, self._config.keep_every
        best = frozenset[int]() if self._evaluations is None else self._evaluations.wanted
        await asyncio.to_thread(self._dirs.rotate, keep_last, keep_every, best)

    def _check_claim(self) -> None:
        if self._claim is None:
            return
        try:
            self._claim.check()
        except NotTheHolder as error:
            raise CheckpointFailed(str(error)) from None

    async def _learner_written(self, path: Path) -> None:
        deadline = time.monotonic() + self._timeout_s
        # a rank on another machine can only report through the shared file system
        missing = [path / sums_name(rank) for rank in range(self._ranks)]
        while missing:
            failures = await asyncio.to_thread(_failures, path)
            if failures:
                raise CheckpointFailed(f"checkpoint {path.parent}: {failures[0]}")
            if time.monotonic() > deadline:
                raise CheckpointFailed(
                    f"checkpoint {path.parent}: {missing[0].name} was not written within "
                    f"learner.timeout_s = {self._timeout_s:g}"
                )
            await asyncio.sleep(POLL_S)
            missing = [file for file in missing if not file.exists()]


def _failures(path: Path) -> list[str]:
    files = sorted(path.glob("failed-*"))
    free_mb = shutil.disk_usage(path).free / 1e6
    unsaid = f"the reason could not be written ({free_mb:.1f} MB are free there)"
    return [file.read_text(encoding="utf-8") or unsaid for file in files]


def _write_own(part: Path, controller: bytes, run: str) -> None:
    write_synced(part / CONTROLLER, controller)
    write_synced(part / RUN, run)
