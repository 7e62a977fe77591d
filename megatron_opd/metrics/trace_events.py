"""Reads the events of trace.json, one from each line: the other side of TraceWriter (trace.py)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

MICROSECOND = 1e-6
ROW_NAME = "process_name"
"""The event that names the row `pid`, by args["name"]."""


class DamagedEvent(ValueError):
    """Reports a line that is no event, such as the last one of a run that was killed."""


class TraceEvent(msgspec.Struct, frozen=True):
    """Holds an event. ts, dur: when it began and how long it took, in microseconds."""

    ph: str
    pid: int = 0
    tid: int = 0
    name: str = ""
    ts: float = 0.0
    dur: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    args: dict[str, Any] = {}

    @property
    def start_s(self) -> float:
        """Returns when it began, in seconds since the trace did."""
        return self.ts * MICROSECOND

    @property
    def stop_s(self) -> float:
        """Returns when it ended."""
        return self.start_s + self.dur * MICROSECOND


_decode = msgspec.json.Decoder(TraceEvent).decode


def trace_event(line: bytes) -> TraceEvent | None:
    """Decode a line of the file; None where it holds none. Raises DamagedEvent."""
    text = line.strip(b", \t\r\n")
    if text in (b"[", b"]", b""):
        return None
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DamagedEvent("not an event of a trace") from None
