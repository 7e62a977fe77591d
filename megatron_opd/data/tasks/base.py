"""What a task is: a way to check a response and, for built-in tasks, a way to make problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with its worked solution.

    prompt: what the model reads. response: what a model trained on the task writes, without the
    end token. answer: what the verifier compares with.
    """

    prompt: str
    answer: str
    response: str


Verifier = Callable[[str, str], bool]
"""(response text, answer) -> whether the response solves the problem. Never raises on any text."""

Generator = Callable[[int, int, int], tuple[list[Problem], list[Problem]]]
"""(train, heldout, seed) -> that many train and held-out problems; no prompt occurs twice."""


@dataclass(frozen=True, slots=True)
class Task:
    """A named task.

    verify: None where no answer can be checked. generate: None without problems of its own.
    """

    name: str
    verify: Verifier | None = None
    generate: Generator | None = None
