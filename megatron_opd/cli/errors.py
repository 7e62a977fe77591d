"""What a user did wrong, or what stopped a run, in one line."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The message is one line naming the key, the rule and the value; exit code 2."""


class RunFailed(Exception):
    """A run that started and could not go on.

    The message is one line naming the cause; exit code 1.
    """
