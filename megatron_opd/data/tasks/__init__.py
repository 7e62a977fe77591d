"""Looks up tasks by name."""

from __future__ import annotations

from megatron_opd.data.tasks.arithmetic import ARITHMETIC
from megatron_opd.data.tasks.base import Problem, Task, Verifier
from megatron_opd.data.tasks.exact import EXACT

__all__ = ["TASKS", "Problem", "Task", "Verifier", "get_task", "get_verifier"]

TASKS: dict[str, Task] = {task.name: task for task in (ARITHMETIC, EXACT, Task("none"))}


def get_task(name: str) -> Task:
    """Return the task called `name`; ValueError with the choices when there is none."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; choices: {', '.join(sorted(TASKS))}")
    return TASKS[name]


def get_verifier(name: str) -> Verifier:
    """Return the verifier of task `name`; ValueError when it has none."""
    verify = get_task(name).verify
    if verify is None:
        choices = ", ".join(sorted(task.name for task in TASKS.values() if task.verify))
        raise ValueError(f"task {name!r} has no verifier to evaluate with; choices: {choices}")
    return verify
