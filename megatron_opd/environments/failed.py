"""Defines how a trajectory fails that its environment spoils."""

from __future__ import annotations


class EnvironmentFailed(Exception):
    """Reports a trajectory that cannot be used. `reason`: one of ENVIRONMENT_REASONS, to count.

    detail: one line for the log.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
