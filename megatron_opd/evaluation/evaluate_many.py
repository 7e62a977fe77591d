"""Runs `opd eval --checkpoints`: evaluates many checkpoints, and goes on where it was interrupted.

Invariant: --out holds every (checkpoint, set) once, of one and the same question; it is replaced
whole after each.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_opd.checkpoint.run_dir import RESOLVED, RunDir
from megatron_opd.checkpoint.state_dirs import MANIFEST, StepDirs, verify
from megatron_opd.config.digests import model_digest
from megatron_opd.config.schema import Config
from megatron_opd.data.files import data_crc32
from megatron_opd.errors import RunFailed, UserError, checked
from megatron_opd.evaluation.best import NotConverted, convert_step
from megatron_opd.evaluation.evaluate import Questions, ask, questions_of
from megatron_opd.evaluation.reports import EvaluationReport
from megatron_opd.metrics.sinks import write_json
from megatron_opd.output import check_plot, check_writable, new_table

Row = dict[str, Any]
READ_AS = (
    *("prompt_key", "answer_key", "task_key", "tasks", "stop_key", "tools_key"),
    *("chat_template", "chat_template_kwargs", "system_prompt", "continue_assistant"),
)
"""Keys of `data` that decide what a row of a held-out set asks."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Names one checkpoint to evaluate.

    updates: that made it; None: unknown. digest: tells its content. is_step: it is a run's own, to
    be converted; otherwise it is a Hugging Face directory.
    """

    path: Path
    updates: int | None
    digest: str
    is_step: bool


def checkpoints_of(paths: Sequence[Path]) -> list[Checkpoint]:
    """Return the checkpoints that these directories hold. Raises UserError.

    A run directory holds those of its steps and its final student, which stands for the step with
    the same updates.
    """
    found: dict[Path, Checkpoint] = {}
    for path in paths:
        for each in _held(path):
            found.setdefault(each.path, each)
    return list(found.values())


def _held(path: Path) -> list[Checkpoint]:
    if (path / RESOLVED).is_file():
        run_dir = RunDir(path)
        dirs = StepDirs(run_dir.checkpoints)
        steps = {updates: _step(dirs.path(updates), updates) for updates in dirs.complete()}
        final, updates = run_dir.final_checkpoint, run_dir.finished_after
        if final.is_dir():
            return [*(s for n, s in steps.items() if n != updates), _exported(final, updates)]
        if steps:
            return list(steps.values())
        raise UserError(f"--checkpoints: {path} is a run without any complete checkpoint")
    if (path / MANIFEST).is_file():
        checked(lambda: verify(path))
        return [_step(path, int(path.name.removeprefix("step-")))]
    if (path / "config.json").is_file():
        return [_exported(path, None)]
    raise UserError(
        "--checkpoints must name run directories, their checkpoints/step-* or Hugging Face "
        f"directories, got {path}"
    )


def _step(path: Path, updates: int) -> Checkpoint:
    crc32 = zlib.crc32((path / MANIFEST).read_bytes())
    return Checkpoint(path.resolve(), updates, f"{crc32:08x}", is_step=True)


def _exported(path: Path, updates: int | None) -> Checkpoint:
    digest = checked(lambda: model_digest(path))
    return Checkpoint(path.resolve(), updates, digest, is_step=False)


def asked(questions: Questions) -> dict[str, Any]:
    """Return what decides the figures besides the checkpoint; one record answers one of these."""
    config = questions.config
    sets = {
        name: {**asdict(settings), "file": str(settings.file), "crc32": data_crc32([settings.file])}
        for name, settings in config.heldout.items()
    }
    data = config.data.model_dump(mode="json", include=set(READ_AS))
    rollout = config.rollout
    ends = {"stop": list(rollout.stop), "stop_token_ids": list(rollout.stop_token_ids)}
    template = questions.template.as_json()
    read = {"clock": template["clock"], "template": template["source"]}
    task = {"task": config.data.task, "seed": config.run.seed} | ends
    environment = config.environment
    played = {} if environment is None else {"environment": environment.model_dump(mode="json")}
    return {"sets": sets} | task | data | read | played


def clock_of(record: Path) -> datetime | None:
    """Return the moment that the questions of a record were rendered at, None without one."""
    try:
        return datetime.fromisoformat(json.loads(record.read_bytes())["question"]["clock"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # Record says what is wrong with it


class EvaluationRecord:
    """Holds the rows of --out. Raises UserError for a file that answers another question."""

    def __init__(self, path: Path, question: Mapping[str, Any]) -> None:
        self._path, self._question = path, json.loads(json.dumps(question))
        self.rows: list[Row] = []
        if not path.exists():
            return
        try:
            kept = json.loads(path.read_bytes())
            question, self.rows = kept["question"], list(kept["rows"])
            _ = [(row["checkpoint"], row["digest"], row["set"]) for row in self.rows]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise UserError(f"--out: {path} is not a record of opd eval; name another") from None
        if question != self._question:
            raise UserError(
                f"--out: {path} holds figures of other held-out sets or settings; name another "
                "file, or remove it"
            )

    def lacks(self, checkpoint: Checkpoint, name: str) -> bool:
        """Return whether a checkpoint is yet to be evaluated on a set."""
        key = (str(checkpoint.path), checkpoint.digest, name)
        return key not in {(row["checkpoint"], row["digest"], row["set"]) for row in self.rows}

    def add(self, checkpoint: Checkpoint, name: str, report: EvaluationReport) -> None:
        """Add a row, in place of one of an earlier content of the same directory."""
        path = str(checkpoint.path)
        others = [row for row in self.rows if (row["checkpoint"], row["set"]) != (path, name)]
        head = {"checkpoint": path, "digest": checkpoint.digest, "updates": checkpoint.updates}
        self.rows = [*others, {**head, "set": name, **report.as_dict()}]
        write_json(self._path, {"question": self._question, "rows": self.rows})


def evaluate_checkpoints(
    config: Config, paths: Sequence[Path], out: Path, plot: Path | None, console: Console
) -> None:
    """Evaluate all checkpoints that `out` lacks, and show all that it holds of them.

    RunFailed: one cannot be evaluated; what was found before stays in `out`.
    """
    check_writable("--out", out)
    if plot is not None:
        check_writable("--plot", plot)
        check_plot(plot)
    checkpoints = checkpoints_of(paths)
    questions = questions_of(config, clock_of(out))
    record = EvaluationRecord(out, asked(questions))
    for checkpoint in checkpoints:
        _evaluate(questions, checkpoint, record, console)
    wanted = {str(checkpoint.path) for checkpoint in checkpoints}
    rows = [row for row in record.rows if row["checkpoint"] in wanted]
    console.print(rows_table(rows, list(questions.sets)))
    if plot is not None:
        from megatron_opd.evaluation.plot import draw

        draw(rows, plot)
        console.print(f"plot: {plot}", soft_wrap=True, markup=False)


def _evaluate(
    questions: Questions, checkpoint: Checkpoint, record: EvaluationRecord, console: Console
) -> None:
    """Evaluate a checkpoint on the sets that the record lacks. RunFailed."""
    missing = {n: each for n, each in questions.sets.items() if record.lacks(checkpoint, n)}
    if not missing:
        console.print(f"{checkpoint.path}: recorded already", soft_wrap=True, markup=False)
        return

    def found(name: str, report: EvaluationReport) -> None:
        record.add(checkpoint, name, report)
        console.print(f"{checkpoint.path} on {name}: {report.line()}", soft_wrap=True, markup=False)

    left = replace(questions, sets=missing)
    if not checkpoint.is_step:
        ask(left, checkpoint.path, found)
        return
    config = questions.config
    with tempfile.TemporaryDirectory(prefix="opd-eval-") as scratch:
        model = Path(scratch) / "model"
        converted = convert_step(checkpoint.path, model, config.student.model, config.learner.dtype)
        try:
            asyncio.run(converted)
        except NotConverted as error:
            raise RunFailed(f"{checkpoint.path} cannot be converted: {error}") from None
        ask(left, model, found)


def rows_table(rows: Sequence[Row], sets: Sequence[str]) -> Table:
    """Return avg@k and its standard error, and pass@k for the largest k, by checkpoint and set."""
    columns = [part for name in sets for part in (f"{name}: avg@k %", "+-", "pass@k %")]
    table = new_table("held-out accuracy", ("checkpoint", "updates", *columns))
    paths = list(dict.fromkeys(row["checkpoint"] for row in rows))
    for path in paths:
        of_path = {row["set"]: row for row in rows if row["checkpoint"] == path}
        cells: list[str] = []
        for name in sets:
            cells += _cells(of_path.get(name))
        updates = next(iter(of_path.values()))["updates"]
        table.add_row(_short(path), "-" if updates is None else str(updates), *cells)
    return table


def _cells(row: Row | None) -> tuple[str, str, str]:
    if row is None:
        return ("-", "-", "-")
    stderr, passes = row["stderr_pct"], row["pass_at_k"]
    largest = max(passes, key=int)
    return (
        f"{row['accuracy_pct']:.1f} (k={row['samples']})",
        "-" if stderr is None else f"{stderr:.1f}",
        f"{passes[largest]:.1f} (k={largest})",
    )


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-3:])
