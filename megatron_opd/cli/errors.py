"""Defines how the program ends other than well: a user's mistake, a failure, a preemption."""

from __future__ import annotations


class UserError(Exception):
    """Reports bad input in one line naming the key, the rule and the value; exit code 2."""


class RunFailed(Exception):
    """Reports why a run that started could not continue, in one line; exit code 1."""


class Preempted(BaseException):
    """Reports in one line that a scheduler ended a run, to be continued; exit code 75.

    No error, so nothing that handles errors may take it for one.
    """
