"""`--resume`: what a run goes on from, and what it must not have changed since.

The newest complete checkpoint of run.dir is taken; one that was being written when the run ended is
left aside, and said so. One that is complete and damaged is refused: whether to go back to an older
one is the user's choice.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from megatron_opd.checkpoint.state_dirs import LEARNER, StepDirs, verify
from megatron_opd.checkpoint.state_files import read_json
from megatron_opd.cli.checkpoints import CONTROLLER, RUN
from megatron_opd.cli.errors import UserError
from megatron_opd.cli.run_dir import RunDir
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import ControllerState, decode_state

MAY_CHANGE = (
    "run.dir",
    "run.updates",
    "metrics.*",
    "checkpoint.*",
    "evaluation.*",
    "*.servers",
    "*.urls",
    "*.host",
    "*.base_port",
    "*.startup_timeout_s",
    "*.request_timeout_s",
    "*.gpu_memory_gib",
    "*.timeout_s",
    "*.threads",
    "rollout.concurrency",
    "rollout.attempts",
    "scoring.concurrency",
    "scoring.attempts",
    "learner.parallel.*",
    "learner.recompute",
    "learner.tokens_per_microbatch",
    "learner.listen_host",
    "learner.listen_port",
    "weight_sync.bucket_bytes",
    "weight_sync.verify_first",
)
"""Keys that change neither what is sampled nor what is learnt from it, but for rounding."""
EXTRAS: Mapping[str, type | tuple[type, ...]] = {
    "elapsed_s": (int, float),
    "wall_s": (int, float),
    "resumed_at_updates": list,
    "accuracies": dict,
    "totals": dict,
    "train_crc32": int,
}
"""What run.json holds: see PipelineRun."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a run goes on. extras: what Checkpoints was given to keep. notes: for the user."""

    path: Path
    state: ControllerState
    extras: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def learner(self) -> Path:
        """The learner's part."""
        return self.path / LEARNER


def find_resumption(config: Config) -> Resumption:
    """What `config` goes on from. Raises UserError with one line for whatever stands against it."""
    run_dir = RunDir(config.run.dir)
    if not run_dir.resolved_config.is_file():
        raise UserError(f"--resume: run.dir {run_dir.path} holds no run")
    _check_unchanged(load_config(Config, run_dir.resolved_config), config, run_dir)
    dirs = StepDirs(run_dir.checkpoints)
    torn, complete = [path.name for path in dirs.torn()], dirs.complete()
    if not complete:
        found = f", only {torn[-1]}, which was not written to its end" if torn else ""
        raise UserError(f"--resume: {dirs.root} holds no complete checkpoint{found}")
    updates = complete[-1]
    path = dirs.path(updates)
    try:
        verify(path)
        state = decode_state((path / CONTROLLER).read_bytes())
        extras = _read_extras(path)
        if state.updates != updates:
            raise ValueError(f"checkpoint {path}: {CONTROLLER} is of {state.updates} updates")
    except (ValueError, OSError) as error:
        raise UserError(f"--resume: {error}; remove it to go on from an older one") from None
    if updates >= config.run.updates:
        raise UserError(
            f"--resume: run.updates must be above the {updates} updates of {path}, "
            f"got {config.run.updates}"
        )
    if extras["train_crc32"] != file_crc32(config.data.train):
        raise UserError(f"--resume: data.train {config.data.train} is not the file it was")
    notes = [f"{name} was not written to its end and is left aside" for name in torn]
    notes.append(f"going on from {path} ({updates} updates)")
    return Resumption(path, state, extras, tuple(notes))


def reopen_run_dir(config: Config, updates: int) -> RunDir:
    """Make the run directory of `updates` updates ago. Raises UserError when it cannot.

    metrics.jsonl is cut back to them; logs, trace and summary of the earlier attempt move to
    earlier/N/; the configuration becomes the new one; unfinished checkpoints are removed.
    """
    run_dir = RunDir(config.run.dir)
    try:
        run_dir.continue_from(config, updates)
        dirs = StepDirs(run_dir.checkpoints)
        for torn in dirs.torn():
            dirs.discard(torn)
    except OSError as error:
        raise UserError(f"run.dir {run_dir.path} cannot be written: {error.strerror}") from None
    return run_dir


def _read_extras(path: Path) -> dict[str, Any]:
    """What PipelineRun keeps besides learner and controller. ValueError: not all of it is there."""
    extras = read_json(path / RUN)
    for key, kind in EXTRAS.items():
        if not isinstance(extras.get(key), kind):
            raise ValueError(f"checkpoint {path}: {RUN} has no {key}")
    return extras


def file_crc32(path: Path) -> int:
    """Tells a changed file."""
    return zlib.crc32(path.read_bytes())


def _check_unchanged(before: Config, now: Config, run_dir: RunDir) -> None:
    old, new = _flat(before), _flat(now)
    for key in sorted(old.keys() | new.keys()):
        if any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE):
            continue
        if old.get(key) != new.get(key):
            raise UserError(
                f"--resume: {key} must be what it was in {run_dir.resolved_config}, "
                f"{json.dumps(old.get(key))}, got {json.dumps(new.get(key))}"
            )


def _flat(config: Config) -> dict[str, Any]:
    return dict(_leaves("", config.model_dump(mode="json")))


def _leaves(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(f"{prefix}{key}.", cast(dict[str, Any], value))
        else:
            yield f"{prefix}{key}", value
