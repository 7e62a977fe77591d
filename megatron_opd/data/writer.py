"""Writes a built-in task's problems as JSONL files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_opd.data.tasks import TASKS, Problem, get_task


@dataclass(frozen=True, slots=True)
class WrittenData:
    """Names the files written, and how many problems each holds."""

    train_file: Path
    heldout_file: Path
    train: int
    heldout: int


def write_task(name: str, out_dir: Path, train: int, heldout: int, seed: int) -> WrittenData:
    """Write `out_dir`/train.jsonl and heldout.jsonl with {prompt, answer, response} rows.

    Raises ValueError for a task without problems of its own and for counts it cannot provide.
    """
    generate = get_task(name).generate
    if generate is None:
        choices = ", ".join(sorted(task.name for task in TASKS.values() if task.generate))
        raise ValueError(f"task {name!r} has no problems of its own; choices: {choices}")
    train_set, heldout_set = generate(train, heldout, seed)
    out_dir.mkdir(parents=True, exist_ok=True)
    written = WrittenData(out_dir / "train.jsonl", out_dir / "heldout.jsonl", train, heldout)
    _write(written.train_file, train_set)
    _write(written.heldout_file, heldout_set)
    return written


def _write(path: Path, problems: Iterable[Problem]) -> None:
    lines = (json.dumps(asdict(problem), ensure_ascii=False) + "\n" for problem in problems)
    path.write_text("".join(lines), encoding="utf-8")
