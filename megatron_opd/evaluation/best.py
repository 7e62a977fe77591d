"""Writes a run's own checkpoints as Hugging Face checkpoints, in a process of its own."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.checkpoint.state_dirs import LEARNER, StepDirs
from megatron_opd.config.schema import Config
from megatron_opd.evaluation.evaluations import Evaluations
from sglang_bridge.errors import one_line


class NotConverted(RuntimeError):
    """Reports in one line why a checkpoint could not be converted."""


async def convert_step(step: Path, target: Path, model: Path, dtype: str) -> None:
    """Write the weights of the run checkpoint `step` to `target`, in Hugging Face's format.

    In a process of its own, whose memory ends with it. model: what the run started from. Raises
    NotConverted.
    """
    convert = ["-m", "megatron_opd", "convert", "megatron-to-hf", str(step / LEARNER), str(target)]
    command = [sys.executable, *convert, "--model", str(model), "--dtype", dtype]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        last = (said.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise NotConverted(one_line(last.removeprefix("error: ")))


async def export_best(config: Config, run_dir: RunDir, evaluations: Evaluations) -> str:
    """Write the student of the best evaluation as checkpoints/best; return a line for the user.

    None is written where the student before the run was best, or the checkpoint is not there: that
    costs no run that is otherwise finished.
    """
    name = evaluations.best_set
    best = None if name is None else evaluations.best(name)
    if best is None:
        return "no best checkpoint: nothing was evaluated"
    of = f"the best evaluation of {name} ({config.evaluation.best_metric})"
    if best.update == 0:
        return f"no best checkpoint: {of} is that before the run"
    step = StepDirs(run_dir.checkpoints).path(best.update)
    if not step.is_dir():
        return f"no best checkpoint: {of} has update {best.update}, and {step} is not there"
    target = run_dir.best_checkpoint
    shutil.rmtree(target, ignore_errors=True)
    try:
        await convert_step(step, target, config.student.model, config.learner.dtype)
    except NotConverted as error:
        return f"no best checkpoint: {step} cannot be converted: {error}"
    return f"checkpoint of {of}, {best.update} updates: {target}"
