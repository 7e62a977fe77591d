"""Counts what happened on one link."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LinkTally:
    """Counts from the start of this process on. Bytes are those of messages' parts but for wire."""

    connections: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    messages_dropped: int = 0
    chunks_sent: int = 0
    wire_bytes_sent: int = 0
    bytes_again: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    chunks_received: int = 0
    refused: dict[str, int] = field(default_factory=dict[str, int])

    def refuse(self, reason: str) -> None:
        """Count frames that were refused, by reason; reasons are a few fixed texts."""
        self.refused[reason] = self.refused.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """Says how a link does.

    connected: the other end was greeted on a connection that is open, as far as is known. rtt_s,
    clock_offset_s (the other clock less ours): None before the first answered heartbeat.
    bytes_per_s: measured, before compression; 0: not yet. waiting_bytes: not acknowledged, of both
    lanes. connections: that were opened. messages_dropped: sent while the other process was
    replaced. bytes_again: sent another time. wire_bytes_sent: with all overhead but TCP's. refused:
    frames by reason; "repeated" and "ahead" are chunks whose bytes were there or lacked others.
    """

    connected: bool
    rtt_s: float | None
    clock_offset_s: float | None
    bytes_per_s: float
    waiting_bytes: int
    connections: int
    messages_sent: int
    bytes_sent: int
    messages_dropped: int
    chunks_sent: int
    wire_bytes_sent: int
    bytes_again: int
    messages_received: int
    bytes_received: int
    chunks_received: int
    refused: dict[str, int]
