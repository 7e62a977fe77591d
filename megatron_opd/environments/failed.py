"""Defines how a trajectory fails that its environment spoils."""

from __future__ import annotations

from megatron_opd.config.wording import line
from megatron_opd.records.drops import ENVIRONMENT_BAD_REPLY, ENVIRONMENT_REASONS


class EnvironmentFailed(Exception):
    """Reports a trajectory that cannot be used. `reason`: a word of records/drops.py, to count.

    detail: one line for the log.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class HostLost(EnvironmentFailed):
    """Reports that a host of environments ended, and with it the processes of all trajectories.

    None of them need be at fault: another host can bring their environments back.
    """


def failure_told(reason: str, detail: str) -> EnvironmentFailed:
    """Return the failure that another process tells; a reason that is none is a bad reply."""
    known = reason if reason in ENVIRONMENT_REASONS else ENVIRONMENT_BAD_REPLY
    return EnvironmentFailed(known, line(detail) or "without a word")
