"""Looks up tasks by name."""

from __future__ import annotations

from typing import Any, cast

from megatron_opd.config.import_path import is_import_path, load_object
from megatron_opd.data.tasks.arithmetic import ARITHMETIC
from megatron_opd.data.tasks.base import Problem, Task, Verifier
from megatron_opd.data.tasks.code import CODE
from megatron_opd.data.tasks.exact import EXACT
from megatron_opd.data.tasks.json_schema import JSON_SCHEMA
from megatron_opd.data.tasks.maths import MATH
from megatron_opd.data.tasks.multiple_choice import MULTIPLE_CHOICE

__all__ = ["TASKS", "Problem", "Task", "Verifier", "get_task", "get_verifier"]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (ARITHMETIC, EXACT, MATH, MULTIPLE_CHOICE, JSON_SCHEMA, CODE, Task("none"))
}


def get_task(name: str) -> Task:
    """Return the task called `name`, or one whose verifier `name` imports (MODULE:FUNCTION).

    ValueError: there is none; the line lists the choices.
    """
    if is_import_path(name):
        found: Any = load_object(name)
        if not callable(found):
            raise ValueError(f"{name} must be a function of a response and an answer")
        return Task(name, verify=cast(Verifier, found))
    if name not in TASKS:
        raise ValueError(
            f"unknown task {name!r}; choices: {', '.join(sorted(TASKS))}, or MODULE:FUNCTION"
        )
    return TASKS[name]


def get_verifier(name: str) -> Verifier:
    """Return the verifier of task `name`; ValueError when it has none."""
    verify = get_task(name).verify
    if verify is None:
        choices = ", ".join(sorted(task.name for task in TASKS.values() if task.verify))
        raise ValueError(f"task {name!r} has no verifier to evaluate with; choices: {choices}")
    return verify
