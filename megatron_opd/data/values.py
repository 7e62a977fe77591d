"""Reads the values of a row's columns; each reader returns a checked value or raises Unusable."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megatron_opd.config.section import MAX_STOP_LENGTH, MAX_STOPS
from megatron_opd.config.wording import shown
from megatron_opd.data.faults import Unusable

# Above it a float cannot hold every whole number, so its digits may differ from the file's.
WHOLE_FLOATS = 2**53
Row = Mapping[str, Any]


def read_text(row: Row, key: str) -> str:
    """Return a string that is not blank."""
    value = present(row, key)
    if not isinstance(value, str):
        raise Unusable("wrong_type", f"{key!r} must be a string, got {type(value).__name__}")
    if not value.strip():
        raise Unusable("empty", f"{key!r} is empty")
    return unicode(value, key)


def read_choice(row: Row, key: str, allowed: Collection[str], cause: str) -> str:
    """Return a string that is one of `allowed`; one that is not is counted by `cause`."""
    value = read_text(row, key)
    if value not in allowed:
        names = ", ".join(sorted(allowed))
        raise Unusable(cause, f"{key!r} must be one of {names}, got {shown(value)}")
    return value


def read_task(row: Row, key: str, allowed: Collection[str]) -> str | None:
    """Return the name of a row's verifier; None where it is missing or null."""
    if row.get(key) is None:
        return None
    return read_choice(row, key, allowed, "unknown_task")


def read_answer(row: Row, key: str, *, needed: bool) -> str | None:
    """Return a string, or a finite number as text; None where it is missing, null or blank.

    needed: None is a fault.
    """
    text = _text_or_number(row, key)
    if text is None and needed:
        why = f"{key!r} is empty" if key in row else f"missing column {key!r}"
        raise Unusable("no_answer", why)
    return text


def read_name(row: Row, key: str) -> str | None:
    """Return a row's own name, text or number; None where it has none."""
    return _text_or_number(row, key)


def read_limit(row: Row, key: str, most: int) -> int | None:
    """Return a whole number in 1..most; None where it is missing or null."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # as pandas writes a column with gaps
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unusable("wrong_type", f"{key!r} must be a whole number, got {shown(value)}")
    if not 1 <= value <= most:
        raise Unusable("bad_limit", f"{key!r} must be in 1..{most}, got {shown(value)}")
    return value


def read_weight(row: Row, key: str) -> float | None:
    """Return a finite number >= 0; None where it is missing or null."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable("wrong_type", f"{key!r} must be a number, got {type(value).__name__}")
    if not 0 <= value < math.inf:
        raise Unusable("bad_weight", f"{key!r} must be finite and >= 0, got {shown(value)}")
    return float(value)


def read_stops(row: Row, key: str) -> tuple[str, ...]:
    """Return the strings of a list, or of one string; none where it is missing or null."""
    value = row.get(key)
    found: list[Any] = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise Unusable("wrong_type", f"{key!r} must be a list of strings, got {shown(value)}")
    if len(found) > MAX_STOPS or not all(0 < len(each) <= MAX_STOP_LENGTH for each in found):
        raise Unusable(
            "bad_limit",
            f"{key!r} must hold at most {MAX_STOPS} strings of 1..{MAX_STOP_LENGTH} characters",
        )
    return tuple(unicode(each, key) for each in found)


def present(row: Row, key: str) -> Any:
    """Return a column's value, whatever it is."""
    if key not in row:
        raise Unusable("missing", f"missing column {key!r}; the columns are {listed(row)}")
    return row[key]


def listed(columns: Collection[str]) -> str:
    """Return the first few names, for people."""
    return ", ".join(shown(name, 40) for name in sorted(columns)[:8]) or "none"


def unicode(text: str, key: str) -> str:
    """Return `text`, whose characters are whole."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
        raise Unusable("wrong_type", f"{key!r} is not valid Unicode ({error.reason})") from None
    return text


def _text_or_number(row: Row, key: str) -> str | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        return unicode(value, key) if value.strip() else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value, key)
    raise Unusable("wrong_type", f"{key!r} must be a string or number, got {type(value).__name__}")


def _number(value: int | float, key: str) -> str:
    """Write a number as a reader does: a column of floats, as pandas makes, holds 42 as 42.0."""
    if not math.isfinite(value) if isinstance(value, float) else value.bit_length() > 4096:
        raise Unusable("not_finite", f"{key!r} must be a finite number, got {str(value)[:20]}")
    if isinstance(value, float) and value.is_integer() and abs(value) <= WHOLE_FLOATS:
        return str(int(value))
    return str(value)
