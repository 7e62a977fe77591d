"""Writes numbers for readers: few digits, units that fit the size."""

from __future__ import annotations

import math

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


def plain(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits; whole numbers keep all of theirs."""
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    if not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def percent(share: float) -> str:
    """Return a share of 1 as percent."""
    return f"{100 * share:.{1 if 0 < share < 0.1 else 0}f} %"


def duration(seconds: float) -> str:
    """Return a duration in the two largest units that it has."""
    if 0 < seconds < 1:
        return f"{plain(1000 * seconds)} ms"
    if seconds < _MINUTE_S:
        return f"{plain(seconds)} s"
    if seconds < _HOUR_S:
        minutes, rest = divmod(round(seconds), _MINUTE_S)
        return f"{minutes} min {rest} s" if minutes < 10 else f"{minutes} min"
    if seconds < _DAY_S:
        hours, rest = divmod(round(seconds), _HOUR_S)
        return f"{hours} h {rest // _MINUTE_S} min"
    days, rest = divmod(round(seconds), _DAY_S)
    return f"{days} d {rest // _HOUR_S} h"


def size(num_bytes: float) -> str:
    """Return a number of bytes in the largest decimal unit that it fills."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{plain(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} bytes"
