"""Defines the errors of the program: what a user did wrong, and what stopped a run."""

from __future__ import annotations


class UserError(Exception):
    """Reports bad input in one line naming the key, the rule and the value; exit code 2."""


class RunFailed(Exception):
    """Reports why a run that started could not continue, in one line; exit code 1."""
