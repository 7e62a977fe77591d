"""Reads the header Retry-After of a server that is too busy (RFC 9110, section 10.2.3)."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def retry_after_s(value: str | None, now: datetime | None = None) -> float | None:
    """Returns how long to wait, in seconds >= 0; None without the header, or for what is no time.

    value: a number of seconds or an HTTP date. now: None takes the clock of this machine.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:18])
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())
