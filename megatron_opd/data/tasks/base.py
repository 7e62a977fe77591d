"""Defines a task: a way to check a response and, for built-in tasks, a way to make problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Holds one problem with its worked solution.

    prompt: what the model reads. response: what a model trained on the task writes, without the
    end token. answer: what the verifier compares with.
    """

    prompt: str
    answer: str
    response: str


Verifier = Callable[..., bool | float]
"""Takes (response text, answer, options by keyword) and returns whether the response is right, or
how right it is as a number in [0, 1]."""

Generator = Callable[[int, int, int], tuple[list[Problem], list[Problem]]]
"""Takes (train, heldout, seed) and returns that many problems; no prompt occurs twice."""


@dataclass(frozen=True, slots=True)
class Task:
    """Names a task and its functions.

    verify: None where no answer can be checked. generate: None without problems of its own.
    bounded: whether verify takes time in proportion to the texts and never raises, so that it needs
    no process of its own. warm: imports what verify needs, before its time counts. joined: makes
    one answer of several; None: each of them is right by itself.
    """

    name: str
    verify: Verifier | None = None
    generate: Generator | None = None
    bounded: bool = False
    warm: Callable[[], object] | None = None
    joined: Callable[[Sequence[str]], str] | None = None
