"""Tells in which state a run is: from its summary, and from whether its controller still lives."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import psutil

from megatron_opd.checkpoint.run_lock import Holder

State = Literal["running", "finished", "failed", "interrupted", "preempted", "crashed", "unknown"]
_OF_A_SUMMARY: tuple[State, ...] = ("finished", "failed", "interrupted", "preempted")
_CLOCK_SLACK_S = 2.0
"""`started` in run.lock has whole seconds."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Describes a run's state. why: in words; empty where the state says it all.

    crashed: it has no summary and its controller is gone. unknown: no summary, and the controller
    is on another machine, where nobody here can look.
    """

    state: State
    why: str = ""


def run_state(summary: Mapping[str, Any] | None, holder: Holder | None) -> RunState:
    """Return the state of a run. holder: what its run.lock says; None: there is no such file.

    A run with a summary whose lock is held is being started again.
    """
    here = holder is not None and holder.host == socket.gethostname()
    if holder is not None and here and is_alive(holder):
        return RunState("running")
    if summary is not None:
        status, cause = summary.get("status"), summary.get("cause")
        known: State | None = next((state for state in _OF_A_SUMMARY if state == status), None)
        if known is None:
            return RunState("unknown", "summary.json names no status")
        return RunState(known, cause if isinstance(cause, str) else "")
    if holder is None:
        return RunState("crashed", "there is no summary.json, and no controller holds the run")
    if not here:
        return RunState("unknown", f"its controller is pid {holder.pid} on {holder.host}")
    return RunState(
        "crashed", f"its controller (pid {holder.pid}) ended without writing summary.json"
    )


def is_alive(holder: Holder) -> bool:
    """Return whether the process that took the lock still exists on this machine."""
    try:
        created_s = psutil.Process(holder.pid).create_time()
    except psutil.Error:
        return False
    try:
        started_s = datetime.strptime(holder.started, "%Y-%m-%d %H:%M:%S %z").timestamp()
    except (ValueError, OverflowError):
        return True
    # a later process was given the same number
    return created_s <= started_s + _CLOCK_SLACK_S
