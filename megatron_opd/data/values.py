"""Reads the values of a row's columns; each reader returns a checked value or raises Unusable.

A key names a column, or leads into one: names of keys and indices of lists, divided by dots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from datetime import date, time
from decimal import Decimal
from fractions import Fraction
from typing import Any

from megatron_opd.config.section import MAX_STOP_LENGTH, MAX_STOPS
from megatron_opd.config.wording import listed, shown
from megatron_opd.data.faults import Unusable
from megatron_opd.data.key_paths import ABSENT, lookup
from megatron_opd.data.plain import plain, unicode, written_number
from megatron_opd.records.mixtures import Shares, shares_of, weights_fault
from megatron_opd.records.types import RightAnswer

Row = Mapping[str, Any]
UNKNOWN_TASK, UNKNOWN_TEACHER = "unknown_task", "unknown_teacher"
BAD_MIXTURE = "bad_mixture"
MOST_WHOLE_BITS = 63
"""Bits of the largest whole number that a column is passed on with, as msgpack holds it."""


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


def read_teachers(row: Row, key: str, allowed: Collection[str], *, mixes: bool) -> Shares:
    """Return who scores a row: the teacher that its value names, or the mixture that it holds.

    A mixture is a mapping of names and weights, or its JSON text. mixes: whether there may be one.
    """
    value = present(row, key)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Unusable(BAD_MIXTURE, f"{key!r} is no JSON, got {shown(value, 60)}") from None
    if not isinstance(value, dict):
        return ((read_choice(row, key, allowed, UNKNOWN_TEACHER), 1.0),)
    held: dict[str, Any] = value
    given = {name: read_weight({key: each}, key) for name, each in held.items()}
    weights = {name: weight for name, weight in given.items() if weight is not None}
    for name in weights:
        read_choice({key: name}, key, allowed, UNKNOWN_TEACHER)
    fault = weights_fault(weights)
    if fault is not None:
        raise Unusable(BAD_MIXTURE, f"{key!r}: {fault}")
    shares = shares_of(weights)
    if len(shares) > 1 and not mixes:
        raise Unusable(BAD_MIXTURE, f"{key!r} mixes teachers with support.type teacher_topk")
    return shares


def read_task(row: Row, key: str, meant: Mapping[str, str]) -> str | None:
    """Return the name of a row's verifier, which its value means; None: it is missing or null."""
    if value_of(row, key) is None:
        return None
    try:
        return meant[read_choice(row, key, meant, UNKNOWN_TASK)]
    except Unusable as error:
        if error.cause != UNKNOWN_TASK:
            raise
        remedy = "leave data.task_key null and name the verifier of all rows in data.task"
        raise Unusable(
            UNKNOWN_TASK, f"{error}; name the verifier that it means in data.tasks, or {remedy}"
        ) from None


def read_answer(row: Row, key: str, *, needed: bool) -> RightAnswer | None:
    """Return a string, or a number or date as text; of a list, those that are there.

    None where it is missing, null or blank. needed: None is a fault.
    """
    value = value_of(row, key)
    if isinstance(value, list | tuple):
        given = (_text_of(each, f"{key}.{number}") for number, each in enumerate(value))
        several = tuple(dict.fromkeys(each for each in given if each is not None))
        text: RightAnswer | None = several if len(several) > 1 else several[0] if several else None
    else:
        text = _text_of(value, key)
    if text is None and needed:
        absent = lookup(row, key) is ABSENT
        raise Unusable("no_answer", f"missing column {key!r}" if absent else f"{key!r} is empty")
    return text


def read_name(row: Row, key: str) -> str | None:
    """Return a row's own name, text, number or date; None where it has none."""
    return _text_of(value_of(row, key), key)


def read_limit(row: Row, key: str, most: int) -> int | None:
    """Return a whole number in 1..most; None where it is missing or null."""
    value = value_of(row, key)
    if value is None:
        return None
    if (
        isinstance(value, float | Decimal) and value == value // 1
    ):  # as pandas writes a column with gaps
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unusable("wrong_type", f"{key!r} must be a whole number, got {shown(value)}")
    if not 1 <= value <= most:
        raise Unusable("bad_limit", f"{key!r} must be in 1..{most}, got {shown(value)}")
    return value


def read_weight(row: Row, key: str) -> float | None:
    """Return a finite number >= 0; None where it is missing or null.

    NaN is no gap here: what a computation failed to weigh would count in full.
    """
    value = value_of(row, key, nan=True)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise Unusable("wrong_type", f"{key!r} must be a number, got {type(value).__name__}")
    if not 0 <= value < math.inf:
        raise Unusable("bad_weight", f"{key!r} must be finite and >= 0, got {shown(value)}")
    return float(value)


def read_stops(row: Row, key: str) -> tuple[str, ...]:
    """Return the strings of a list, or of one string; none where it is missing or null."""
    value = value_of(row, key)
    found: list[Any] = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise Unusable("wrong_type", f"{key!r} must be a list of strings, got {shown(value)}")
    if len(found) > MAX_STOPS or not all(0 < len(each) <= MAX_STOP_LENGTH for each in found):
        raise Unusable(
            "bad_limit",
            f"{key!r} must hold at most {MAX_STOPS} strings of 1..{MAX_STOP_LENGTH} characters",
        )
    return tuple(unicode(each, key) for each in found)


def read_plain(row: Row, key: str) -> Any:
    """Return whatever a column holds, as JSON has it; None where it is missing, null or NaN.

    That is text, whole numbers of at most 63 bits, finite ones, true, false, lists and mappings.
    """
    return _plain_json(value_of(row, key), key)


def present(row: Row, key: str) -> Any:
    """Return a column's value, whatever it is."""
    found = lookup(row, key)
    if found is ABSENT:
        raise Unusable("missing", f"missing column {key!r}; the columns are {listed(row)}")
    return plain(found, key)


def value_of(row: Row, key: str, *, nan: bool = False) -> Any:
    """Return a column's value; None where it is missing or null, or, without `nan`, no number."""
    found = lookup(row, key)
    value = None if found is ABSENT else plain(found, key)
    gap = not nan and isinstance(value, float | Decimal) and math.isnan(value)
    return None if gap else value


def _plain_json(value: Any, key: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return unicode(value, key)
    if isinstance(value, int | float):
        whole = isinstance(value, int)
        if value.bit_length() > MOST_WHOLE_BITS if whole else not math.isfinite(value):
            what = f"a finite number, a whole one of at most {MOST_WHOLE_BITS} bits"
            raise Unusable("not_finite", f"{key!r} must be {what}, got {shown(value, 40)}")
        return value
    if isinstance(value, list):
        several: list[Any] = value
        return [_plain_json(each, key) for each in several]
    if isinstance(value, dict):
        held: dict[str, Any] = value
        return {unicode(name, key): _plain_json(each, key) for name, each in held.items()}
    raise Unusable(
        "wrong_type",
        f"{key!r} must hold text, numbers, true, false, lists and mappings, got "
        f"{type(value).__name__}; write it as text",
    )


def _text_of(value: Any, key: str) -> str | None:
    if isinstance(value, str):
        return unicode(value, key) if value.strip() else None
    if isinstance(value, float | Decimal) and math.isnan(value):
        return None
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, int | float | Decimal | Fraction) and not isinstance(value, bool):
        return written_number(value, key)
    if value is None:
        return None
    got = type(value).__name__
    if isinstance(value, dict) and value:
        held: dict[str, Any] = value
        path = f"{key}.{min(held)}"
        got += (
            f" of {listed(held)}; name what counts, such as {shown(path, 60)}, or store JSON text"
        )
    raise Unusable("wrong_type", f"{key!r} must be text, a number or a date, got {got}")
