"""Decides what `--auto-resume` does: one command for a job's first start and for all later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.config.schema import Config
from megatron_opd.run.resume import changes_of


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
