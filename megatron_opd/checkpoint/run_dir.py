"""Lays out the run directory, and never deletes anything from it that `opd` did not write."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_opd.checkpoint.claimant import RUN_ID
from megatron_opd.checkpoint.kept_rows import KeptRows, rows_before
from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.checkpoint.run_lock import LOCK, RunDirHeld, RunLock, refuse_if_held
from megatron_opd.config.load import dump_config
from megatron_opd.config.section import Section
from megatron_opd.errors import UserError
from megatron_opd.metrics.sinks import reserve_json
from megatron_opd.wire.keys import KEYS_FILE

RESOLVED = "config.resolved.yaml"
OURS = (
    RESOLVED,
    "metrics.jsonl",
    "evaluations.jsonl",
    "rollouts.jsonl",
    "summary.json",
    "trace.json",
    "checkpoints",
    "logs",
    "tensorboard",
    "wandb",
    "wandb.json",
    "earlier",
    "changes.json",
    ".summary.json.reserved",
    "fleet",
    "costs.json",
    "template.json",
)


@dataclass(frozen=True, slots=True)
class RunDir:
    """Names the paths of one run's products: one directory holds all that a reader would quote."""

    path: Path

    @property
    def resolved_config(self) -> Path:
        """Returns the configuration with every default filled in, which child processes read."""
        return self.path / RESOLVED

    @property
    def metrics(self) -> Path:
        """Returns the file with one JSON object per learner update."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """Returns the file with one JSON object per evaluated set."""
        return self.path / "evaluations.jsonl"

    @property
    def rollouts(self) -> Path:
        """Returns the file with one JSON object per recorded rollout."""
        return self.path / "rollouts.jsonl"

    @property
    def summary(self) -> Path:
        """Returns the file with the figures of the whole run."""
        return self.path / "summary.json"

    @property
    def costs(self) -> Path:
        """Returns the file of what all work cost in a simulated run."""
        return self.path / "costs.json"

    @property
    def changes(self) -> Path:
        """Returns the file of changes accepted when resuming; see run/resume.py."""
        return self.path / "changes.json"

    @property
    def template(self) -> Path:
        """Returns the file of the chat template and of the moment that it is given."""
        return self.path / "template.json"

    @property
    def trace(self) -> Path:
        """Returns the trace for Perfetto or Chrome."""
        return self.path / "trace.json"

    @property
    def logs(self) -> Path:
        """Returns the directory with one log file per process."""
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        """Returns the directory of TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Returns the directory of the run's checkpoints and the final student."""
        return self.path / "checkpoints"

    @property
    def final_checkpoint(self) -> Path:
        """Returns the trained student in Hugging Face format."""
        return self.checkpoints / "final"

    @property
    def best_checkpoint(self) -> Path:
        """Returns the student of the best evaluation in Hugging Face format."""
        return self.checkpoints / "best"

    @property
    def finished_after(self) -> int | None:
        """Returns the updates of a run that is finished, None for any other. UserError: damaged.

        A simulated run is none: it trained nothing.
        """
        return self._finished()[0]

    @property
    def stopped_early(self) -> bool:
        """Returns whether the run is finished before its last update. UserError: damaged."""
        return self._finished()[1]

    def _finished(self) -> tuple[int | None, bool]:
        if not self.summary.exists():
            return None, False
        try:
            summary = json.loads(self.summary.read_bytes())
            finished = summary["status"] == "finished" and not summary.get("simulated", False)
            updates = summary["updates"] if finished else None
            early = finished and summary.get("stopped_early_at") is not None
        except (OSError, ValueError, TypeError, KeyError, RecursionError, AttributeError):
            raise UserError(f"{self.summary} is damaged: not a run's summary") from None
        return updates, early

    def continue_from(
        self, config: Section, updates: int, notes: str = "", evaluations: str = ""
    ) -> None:
        """Reset the directory to its state after `updates` updates; see run/resume.py.

        notes: comment lines for the head of the resolved configuration. evaluations: rows of the
        evaluations until then.

        May raise OSError; UserError, before anything is changed, for a damaged metrics.jsonl or
        rollouts.jsonl.
        """
        kept = self._rows_before(updates)
        aside = self._aside()
        for product in (self.logs, self.trace, self.summary):
            if product.exists():
                product.rename(aside / product.name)
        self.logs.mkdir()
        for exported in (self.final_checkpoint, self.best_checkpoint):
            if exported.exists():
                shutil.rmtree(exported)  # by the shorter run
        for rows in kept:
            rows.replace()
        self._keep_evaluations(evaluations)
        write_synced(self.resolved_config, notes + dump_config(config))
        reserve_json(self.summary)

    def rewind(self, updates: int, evaluations: str) -> None:
        """Cut the files of rows back to the first `updates` updates; the trace moves to earlier/N/.

        For a run that goes on in the same process. evaluations: rows of those until then. May raise
        OSError; UserError as continue_from.
        """
        kept = self._rows_before(updates)
        if self.trace.exists():
            self.trace.rename(self._aside() / self.trace.name)
        for rows in kept:
            rows.replace()
        self._keep_evaluations(evaluations)

    def _keep_evaluations(self, rows: str) -> None:
        if rows or self.evaluations.exists():
            write_synced(self.evaluations, rows)

    def _aside(self) -> Path:
        """Make the next directory earlier/N."""
        earlier = self.path / "earlier"
        earlier.mkdir(exist_ok=True)
        taken = [int(entry.name) for entry in earlier.iterdir() if entry.name.isdecimal()]
        aside = earlier / f"{max(taken, default=0) + 1}"
        aside.mkdir()
        return aside

    def _rows_before(self, updates: int) -> list[KeptRows]:
        """Return the rows of the first `updates` updates, of every file that must lose others."""
        return [rows_before(path, updates) for path in (self.metrics, self.rollouts)]


def hold_run_dir(path: Path, *, resume: bool, overwrite: bool) -> RunLock:
    """Lock the run directory before anything in it is changed.

    Raises UserError: another run holds it, or it is none that this run may use.
    """
    check_run_dir(path, resume=resume, overwrite=overwrite)
    try:
        return RunLock.take(path)
    except RunDirHeld as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"run.dir {path} cannot be written: {error.strerror}") from None


def check_run_dir(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Reject a run directory that another run holds, or that holds what must not be replaced.

    Changes nothing. Raises UserError.
    """
    present = _entries(path)
    try:
        refuse_if_held(path)
    except RunDirHeld as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"run.dir {path} cannot be read: {error.strerror}") from None
    if resume:
        if RESOLVED not in present:
            raise UserError(f"--resume: run.dir {path} holds no run")
        return
    _refuse_strangers(path, present)
    if present and not overwrite:
        raise UserError(f"run.dir {path} holds an earlier run; choose another or pass --overwrite")


def check_place(path: Path) -> None:
    """Reject a run directory that no run could use, now or with --overwrite, for `opd check`.

    Changes nothing. Raises UserError.
    """
    _refuse_strangers(path, _entries(path))
    whole = path.absolute()
    there = next(part for part in (whole, *whole.parents) if part.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"run.dir {path} cannot be written: {there} does not allow it")


def _entries(path: Path) -> list[str]:
    """List a run directory but its lock, keys and id. UserError: none, or not readable."""
    try:
        for part in (path, *path.parents):
            if part.exists() and not part.is_dir():
                raise UserError(f"run.dir must be a directory, {part} is a file (got {path})")
        present = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    except OSError as error:
        raise UserError(f"run.dir {path} cannot be read: {error.strerror}") from None
    return [name for name in present if name not in (LOCK, KEYS_FILE, RUN_ID)]


def _refuse_strangers(path: Path, present: Sequence[str]) -> None:
    if present and RESOLVED not in present:
        raise UserError(
            f"run.dir {path} holds files that are not a run's ({present[0]}); choose a directory "
            "that is empty or not there yet"
        )


def prepare_run_dir(path: Path, config: Section) -> RunDir:
    """Prepare `path` for a new run that holds its lock: products of an earlier run are removed.

    Raises UserError.
    """
    run_dir = RunDir(path)
    try:
        for name in OURS:
            target = path / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        run_dir.logs.mkdir(parents=True)
        run_dir.resolved_config.write_text(dump_config(config), encoding="utf-8")
        reserve_json(run_dir.summary)
    except OSError as error:
        raise UserError(f"run.dir {path} cannot be written: {error.strerror}") from None
    return run_dir
