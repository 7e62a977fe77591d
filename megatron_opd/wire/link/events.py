"""Defines what an end of a link tells its owner."""

from __future__ import annotations

from dataclasses import dataclass


class LinkRefused(Exception):
    """Reports in one line why the other end will have nothing to do with this process."""


@dataclass(frozen=True, slots=True)
class Received:
    """Holds a message."""

    peer: str
    lane: int
    parts: tuple[bytes | memoryview, ...]


@dataclass(frozen=True, slots=True)
class Restarted:
    """Says that the other process is a new one, or the first.

    Nothing of the one before comes after this, and what was sent before this was taken from `next`
    never reaches the new one (what was sent before the very first does).
    """

    peer: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Says that there was no sign of life for silence_s; what is sent waits."""

    peer: str


@dataclass(frozen=True, slots=True)
class Mended:
    """Says that a peer whose link was broken is back; nothing was lost."""

    peer: str


Event = Received | Restarted | Broken | Mended
