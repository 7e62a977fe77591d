"""Finds what `--resume` continues from, and rejects what must not have changed since.

The newest complete checkpoint of run.dir is taken; one that was being written when the run ended is
ignored, with a note. A complete but damaged one is rejected: whether to go back to an older one is
the user's choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.checkpoint.state_dirs import LEARNER, StepDirs, verify
from megatron_opd.checkpoint.state_files import read_json
from megatron_opd.config.digests import flat, matches
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.config.wording import line
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.controller.snapshot_codec import decode_state
from megatron_opd.data.file_sums import FileDifference, FilePart
from megatron_opd.data.template import RunTemplate
from megatron_opd.errors import UserError
from megatron_opd.evaluation.progress import EvaluationProgress, progress_from
from megatron_opd.inputs.kept_data import COST, TRAIN_KEY, Begun, KeptData, compared, read_kept
from megatron_opd.metrics.persist import restore_totals
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.run.checkpoints import CONTROLLER, RUN

MAY_CHANGE = (
    "run.dir",
    "run.max_steps",
    "data.epochs",
    "metrics.*",
    "checkpoint.*",
    "evaluation.*",
    "data.heldout*",
    "*.servers",
    "*.urls",
    "*.host",
    "*.base_port",
    "*.startup_timeout_s",
    "*.request_timeout_s",
    "*.gpu_memory_gib",
    "*.gpus",
    "cluster.*",
    "security.*",
    "workers.*",
    "*.timeout_s",
    "*.threads",
    "*.api_key_env",
    "rollout.concurrency",
    "rollout.attempts",
    "verifier.workers",
    "scoring.concurrency",
    "scoring.attempts",
    "scoring.guard",
    "scoring.guard_stop_after",
    "learner.parallel.*",
    "learner.recompute",
    "learner.max_tokens_per_microbatch",
    "learner.mismatch_limit",
    "learner.listen_host",
    "learner.listen_port",
    "weight_sync.type",
    "weight_sync.backend",
    "weight_sync.bucket_bytes",
    "weight_sync.staging",
    "weight_sync.staging_bytes",
    "weight_sync.overlap",
    "weight_sync.relay",
    "weight_sync.verify_every",
    "weight_sync.directory",
    "weight_sync.keep_versions",
    "weight_sync.delta",
    "weight_sync.full_every",
)
"""Keys that change neither what is sampled nor what is learnt from it, except by rounding."""
CANNOT_CHANGE = {
    "student.model": "the checkpoint's weights and samples are of that model",
    "learner.dtype": "the checkpoint's weights and optimizer are stored in it",
    "teacher*.source.type": "the checkpoint holds what the teacher followed with",
    "teacher*.source.every": "the checkpoint holds the teacher's last version, or none",
    "data.teacher_key": "the checkpoint's samples were scored by it",
    "objective.type": "the checkpoint's samples were scored for it",
    "objective.terms": "the checkpoint's samples were scored for them",
    "support": "the checkpoint's samples were cached with it",
    "support.*": "the checkpoint's samples were cached with it",
    "rollout.group_size": "the checkpoint's samples were grouped by it",
    "buffer.*": "the checkpoint's samples were admitted under it",
    "learner.routing_replay": "the checkpoint's samples carry what it needs, or do not",
    "learner.routing_weights": "the checkpoint's samples carry what it needs, or do not",
}
"""Keys whose change cannot work, each with the reason."""
EXTRAS: Mapping[str, type | tuple[type, ...]] = {
    "elapsed_s": (int, float),
    "wall_s": (int, float),
    "resumed_at_updates": list,
    "evaluations": dict,
    "totals": dict,
    "data": dict,
    "template": dict,
}
"""Keys that run.json holds: see attempt.py."""
LONGEST_S = 1e12


@dataclass(frozen=True, slots=True)
class Change:
    """Records a key whose change was accepted on resuming. at_updates: where the run continued."""

    at_updates: int
    key: str
    before: Any
    after: Any

    @property
    def line(self) -> str:
        """Returns the line about the change for the user."""
        values = f"{json.dumps(self.before)} to {json.dumps(self.after)}"
        return f"resumed at {self.at_updates} updates with {self.key} changed from {values}"


@dataclass(frozen=True, slots=True)
class Resumption:
    """Says where a run continues.

    extras: what Checkpoints was given to keep. changes: every accepted change of this resumption
    and of those before. notes: for the user. begun: state and data as the checkpoint has them, and
    the data as it is.
    """

    path: Path
    state: ControllerState
    extras: dict[str, Any]
    notes: tuple[str, ...]
    begun: Begun
    changes: tuple[Change, ...] = ()

    @property
    def template(self) -> RunTemplate:
        """Returns what the run renders chats with."""
        return RunTemplate.from_json(self.extras["template"])

    @property
    def learner(self) -> Path:
        """Returns the learner's part of the checkpoint."""
        return self.path / LEARNER

    @property
    def evaluations(self) -> EvaluationProgress:
        """Returns what was known of evaluations."""
        return progress_from(self.extras["evaluations"])


def find_resumption(
    config: Config, accepted: Sequence[str] = (), *, data_in_memory: bool = False
) -> Resumption:
    """Find what `config` continues from. Raises UserError with one line for any obstacle.

    accepted: keys that may differ from the run's although what is learnt depends on them, and
    data.train if its files may. data_in_memory: whether the files are not read again.
    """
    run_dir = RunDir(config.run.dir)
    if not run_dir.resolved_config.is_file():
        raise UserError(f"--resume: run.dir {run_dir.path} holds no run")
    changed = changes_of(config, accepted)
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
            raise ValueError(f"checkpoint {path}: {CONTROLLER} holds {state.updates} updates")
    except (ValueError, OSError) as error:
        raise UserError(f"--resume: {error}; remove it to continue from an older one") from None
    # one that made its last update may yet have to evaluate and export
    if updates > config.run.max_steps or (
        updates == config.run.max_steps == run_dir.finished_after
    ):
        raise UserError(
            f"--resume: run.max_steps must be above the {updates} updates of {path}, "
            f"got {config.run.max_steps}"
        )
    _check_left(config, run_dir, updates)
    kept = read_kept(extras["data"])
    if data_in_memory:
        same = (FileDifference.NONE,) * len(kept.sums)
        begun = Begun(state, kept, kept.sums, same, accepted=False)
    else:
        begun = _begun(config, state, kept, accepted=TRAIN_KEY in accepted)
        if FileDifference.CHANGED in begun.differences:
            changed.setdefault(TRAIN_KEY, (_in_json(kept.sums), _in_json(begun.sums)))
        elif TRAIN_KEY in accepted and TRAIN_KEY not in changed:
            raise UserError(f"--accept-changes: {TRAIN_KEY} has not changed, or only grown")
    notes = [f"{name} was not written completely and is ignored" for name in torn]
    notes.append(f"continuing from {path} ({updates} updates)")
    now = tuple(Change(updates, key, *values) for key, values in changed.items())
    notes += [change.line for change in now]
    changes = (*_earlier_changes(run_dir), *now)
    return Resumption(path, state, extras, tuple(notes), begun, changes)


def _begun(config: Config, state: ControllerState, kept: KeptData, *, accepted: bool) -> Begun:
    """Compare the data with the checkpoint's. UserError: it is not there, or changed unaccepted."""
    try:
        sums, differences = compared(config, kept)
    except (ValueError, OSError) as error:
        raise UserError(f"--resume: {TRAIN_KEY}: {line(error)}") from None
    changed = [
        str(file.path)
        for file, each in zip(config.data.train, differences, strict=True)
        if each is FileDifference.CHANGED
    ]
    if changed and not accepted:
        raise UserError(
            f"--resume: {TRAIN_KEY} {', '.join(changed)} has changed since the checkpoint, by more "
            f"than rows added at its end; to continue: --accept-changes {TRAIN_KEY} ({COST})"
        )
    return Begun(state, kept, sums, differences, accepted)


def _in_json(sums: Sequence[Sequence[FilePart]]) -> list[list[str]]:
    return [[f"{part.size} bytes, crc32 {part.crc32}" for part in each] for each in sums]


def _check_left(config: Config, run_dir: RunDir, updates: int) -> None:
    """Raise UserError for a run that ended because its data did, and would at once again."""
    earlier = load_config(Config, run_dir.resolved_config)
    ended_so = updates == run_dir.finished_after and not run_dir.stopped_early
    used_up = ended_so and updates < earlier.run.max_steps
    if used_up and config.data.epochs == earlier.data.epochs:
        raise UserError(
            f"--resume: data.epochs must be above {config.data.epochs}, as the data was used up "
            f"after {updates} updates"
        )


def _earlier_changes(run_dir: RunDir) -> tuple[Change, ...]:
    """Return what resumptions before this one were told to change. Raises UserError."""
    try:
        content = run_dir.changes.read_bytes() if run_dir.changes.exists() else b"[]"
        changes = tuple(Change(**change) for change in json.loads(content))
        if not all(type(c.at_updates) is int and c.key.isprintable() for c in changes):
            raise ValueError(changes)
        return changes
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"--resume: {run_dir.changes} is damaged: not a list of changes") from None


def reopen_run_dir(
    config: Config, updates: int, changes: Sequence[Change] = (), evaluations: str = ""
) -> RunDir:
    """Reset the run directory to its state after `updates` updates. Raises UserError if impossible.

    metrics.jsonl is cut back to them, evaluations.jsonl to the rows `evaluations`; logs, trace and
    summary of the earlier attempt move to earlier/N/; the configuration becomes the new one, with a
    comment line for each accepted change, which changes.json keeps too; unfinished
    checkpoints are removed.
    """
    run_dir = RunDir(config.run.dir)
    try:
        head = "".join(f"# {change.line}\n" for change in changes)
        run_dir.continue_from(config, updates, head, evaluations)
        if changes:
            write_synced(run_dir.changes, json.dumps([asdict(change) for change in changes]))
        dirs = StepDirs(run_dir.checkpoints)
        for torn in dirs.torn():
            dirs.discard(torn)
    except OSError as error:
        raise UserError(f"run.dir {run_dir.path} cannot be written: {error.strerror}") from None
    return run_dir


def _read_extras(path: Path) -> dict[str, Any]:
    """Read what a checkpoint keeps besides learner and controller.

    ValueError: something is missing.
    """
    extras = read_json(path / RUN)
    for key, kind in EXTRAS.items():
        if not isinstance(extras.get(key), kind):
            raise ValueError(f"checkpoint {path}: {RUN} has no {key}")
    numbers = [extras["elapsed_s"], extras["wall_s"]]
    whole = extras["resumed_at_updates"]
    if not (
        all(type(n) in (int, float) and 0 <= n <= LONGEST_S for n in numbers)
        and all(type(n) is int for n in whole)
    ):
        raise ValueError(f"checkpoint {path}: {RUN} holds malformed times or counts")
    try:
        progress_from(extras["evaluations"])
        restore_totals(RunTotals(), extras["totals"], 0.0)
        RunTemplate.from_json(extras["template"])
        read_kept(extras["data"])
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"checkpoint {path}: totals, evaluations, template or data of {RUN} are damaged: "
            f"{line(error)}"
        ) from None
    return extras


def changes_of(config: Config, accepted: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return {accepted key: (before, now)}. Raises UserError for any other key that differs.

    before: as the run in run.dir has it.
    """
    run_dir = RunDir(config.run.dir)
    both = load_config(Config, run_dir.resolved_config), config
    old, new = (flat(each.model_dump(mode="json")) for each in both)
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    differing = [key for key in differing if not matches(key, MAY_CHANGE)]
    for key in accepted:
        if key not in (*differing, TRAIN_KEY):  # its files may differ
            same = (
                "has not changed" if key in old.keys() | new.keys() else "is not a key of this run"
            )
            raise UserError(
                f"--accept-changes: {key} {same}, or may always change; name keys that differ from "
                f"{run_dir.resolved_config} (differing: {', '.join(differing) or 'none'})"
            )
    for key in differing:
        rule = f"{key} must be unchanged from {run_dir.resolved_config}"
        values = f"{json.dumps(old.get(key))}, got {json.dumps(new.get(key))}"
        reason = next((why for name, why in CANNOT_CHANGE.items() if fnmatchcase(key, name)), None)
        if reason is not None:
            raise UserError(f"--resume: {rule}, {values}: {reason}")
        if key not in accepted:
            raise UserError(
                f"--resume: {rule}, {values}; to change it anyway: --accept-changes {key}"
            )
    return {key: (old.get(key), new.get(key)) for key in differing}


def state_of(resumed: Resumption | None) -> ControllerState:
    """Return what a controller continues from; None: from the beginning."""
    return NOTHING_YET if resumed is None else resumed.state


def resumed_figures(resumed: Resumption | None) -> dict[str, Any]:
    """Return the keys of summary.json that say where a run continued, and with what changed."""
    if resumed is None:
        return {"resumed_at_updates": [], "resumed_with_changes": []}
    return {
        "resumed_at_updates": resumed_at(resumed),
        "resumed_with_changes": [asdict(change) for change in resumed.changes],
    }


def resumed_at(resumed: Resumption | None) -> list[int]:
    """Return the updates at which a run was continued, this time included."""
    if resumed is None:
        return []
    return [*resumed.extras["resumed_at_updates"], resumed.state.updates]


@dataclass(frozen=True, slots=True)
class Start:
    """Says how a run begins. overwrite: what an earlier attempt left is removed."""

    resume: bool = False
    overwrite: bool = False


def how_to_start(config: Config, accepted: Sequence[str] = ()) -> Start | None:
    """Return how to start by what run.dir holds; None: the run there is finished.

    An attempt that ended before its first checkpoint is begun anew. UserError: the run there has
    other settings than `config`.
    """
    run_dir = RunDir(config.run.dir)
    if not run_dir.resolved_config.is_file():
        return Start()
    finished_after = run_dir.finished_after
    complete = finished_after is not None and finished_after >= config.run.max_steps
    if complete or run_dir.stopped_early:
        return None
    if finished_after is not None or StepDirs(run_dir.checkpoints).complete():
        return Start(resume=True)
    changes_of(config, accepted)
    return Start(overwrite=True)
