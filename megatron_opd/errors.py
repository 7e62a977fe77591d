"""Defines how the program ends other than well: a user's mistake, a failure, a preemption."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ResultT = TypeVar("ResultT")


class UserError(Exception):
    """Reports bad input in one line naming the key, the rule and the value; exit code 2."""


class RunFailed(Exception):
    """Reports why a run that started could not continue, in one line; exit code 1."""


class Preempted(BaseException):
    """Reports in one line that a scheduler ended a run, to be continued; exit code 75.

    No error, so nothing that handles errors may take it for one.
    """


class PartGone(RuntimeError):
    """Reports in one line that a part is gone while the controller's loops do not run."""


class LearnerError(RuntimeError):
    """Reports in one line that the learner failed or did not answer in time.

    final: another learner would fail in the same way.
    """

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


def kept_traceback(error: BaseException, log: Path) -> str:
    """Write the traceback of an error; return where it is, or why not."""
    try:
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError as error:
        return f"its traceback could not be written to {log}: {error.strerror}"
    return f"its traceback is in {log}"


def checked(load: Callable[[], ResultT]) -> ResultT:
    """Call `load`; a ValueError about the user's files becomes a UserError."""
    try:
        return load()
    except ValueError as error:
        raise UserError(str(error)) from None


class CheckpointFailed(RuntimeError):
    """Reports in one line that a checkpoint could not be written."""
