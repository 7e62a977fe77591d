"""Turns values of other libraries into Python's own: those of NumPy, pandas and pyarrow.

Invariant: a value is the same one afterwards, or its row is a fault; nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from megatron_opd.data.faults import Unusable

WHOLE_FLOATS = 2**53
"""Above it a float cannot hold every whole number, so its digits may differ from the file's."""
SURE_DIGITS = 15
"""Digits of a number that its float gives back as they were."""
PLAINLY = (1e-7, 1e21)
"""Floats between are written without an exponent, as people and the writers of JSON do."""
MOST_BITS = 4096
"""Bits of the largest number."""
LOG2_10 = math.log2(10)
DEEPEST = 64
"""Lists and mappings within each other; schemas of tools have about ten."""
_PANDAS_MISSING = ("NAType", "NaTType")


def plain(value: Any, key: str, depth: int = 0) -> Any:
    """Return a value, and all that it holds, as Python's own. Raises Unusable.

    What Python has no type for stays as it is, to be refused by its name. Decimals are finite.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > DEEPEST:
        raise Unusable("wrong_type", f"{key!r} holds more than {DEEPEST} levels within each other")
    if isinstance(value, np.ndarray):
        held: Any = list(value) if value.ndim else value[()]
        # pandas reads lists of tables into arrays
        return without_gaps(plain(held, key, depth + 1))
    if isinstance(value, str):  # before NumPy's, whose `item` drops zeros at the end of texts
        return str.__str__(value)
    if isinstance(value, np.generic):
        return _scalar(value, key, depth)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Decimal):
        return _decimal(value, key)
    if isinstance(value, Mapping):
        named: Mapping[Any, Any] = value
        return {_name(name, key): plain(each, key, depth + 1) for name, each in named.items()}
    if isinstance(value, list | tuple):
        several: list[Any] | tuple[Any, ...] = value
        return [plain(each, key, depth + 1) for each in several]
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    missing = kind.__name__ in _PANDAS_MISSING and kind.__module__.startswith("pandas")
    return None if missing else value


def unicode(text: str, key: str) -> str:
    """Return `text`, whose characters are whole."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
        raise Unusable("wrong_type", f"{key!r} is not valid Unicode ({error.reason})") from None
    return text


def without_gaps(value: Any) -> Any:
    """Return a value of a table, its mappings without keys of null.

    A table gives every mapping of a column the keys of all of them.
    """
    if isinstance(value, dict):
        held: dict[Any, Any] = value
        return {key: without_gaps(each) for key, each in held.items() if each is not None}
    if isinstance(value, list):
        several: list[Any] = value
        return [without_gaps(each) for each in several]
    return value


def table_rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a pyarrow table or batch as plain values. Raises what pyarrow does."""
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    short = {field.name: _shortening(field.type) or _as_it_is for field in table.schema}
    return [{key: without_gaps(short[key](each)) for key, each in row.items()} for row in rows]


def written_number(value: int | float | Decimal | Fraction, key: str) -> str:
    """Write a number as a reader does: a column of floats, as pandas makes, holds 42 as 42.0."""
    if isinstance(value, Fraction):
        above, below = (written_number(part, key) for part in value.as_integer_ratio())
        return above if below == "1" else f"{above}/{below}"
    if isinstance(value, Decimal):  # nor the zeros that the scale of its column adds
        text = f"{value:f}" if value else "0"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if not math.isfinite(value) if isinstance(value, float) else value.bit_length() > MOST_BITS:
        shown = hex(value) if isinstance(value, int) else str(value)
        raise Unusable("not_finite", f"{key!r} must be a finite number, got {shown[:20]}")
    if isinstance(value, float) and value.is_integer() and abs(value) <= WHOLE_FLOATS:
        return str(int(value))
    if isinstance(value, float) and PLAINLY[0] <= abs(value) < PLAINLY[1]:
        text = np.format_float_positional(value, trim="-")
        if abs(value) <= WHOLE_FLOATS or len(text.strip("-0")) <= SURE_DIGITS:
            return text
    return str(value)


def _decimal(value: Decimal, key: str) -> Decimal | float:
    if value.is_nan():
        return math.nan
    if value.is_infinite():
        return float(value)
    if value and abs(value.adjusted()) * LOG2_10 > MOST_BITS:
        raise Unusable("not_finite", f"{key!r} must be a finite number, got {str(value)[:20]}")
    return value


def _name(name: Any, key: str) -> str:
    if not isinstance(name, str):
        kind = type(name).__name__
        raise Unusable("wrong_type", f"{key!r} holds a mapping whose keys must be text, got {kind}")
    return str.__str__(name)


def _scalar(value: np.generic, key: str, depth: int) -> Any:
    if isinstance(value, np.datetime64):
        return _moment(value)
    if value.dtype.char in "ef":
        return _shortest(value)
    if value.dtype.char in "mgGV":  # durations, long floats, records: `item` says less of them
        return value
    return plain(value.item(), key, depth + 1)


def _moment(value: np.datetime64) -> Any:
    if np.isnat(value):
        return None
    coarse = value.astype("datetime64[us]")
    whole: Any = value.item() if np.datetime_data(value.dtype)[0] == "D" else coarse.item()
    same = not isinstance(whole, int) and coarse == value
    return whole if same else str(value)  # nanoseconds, and years beyond Python's calendar


def _shortest(value: np.generic) -> float:
    """Return the number that is written so: the nearest float to 0.1 of 32 bits is 0.1000000015."""
    return float(str(value))


def _shortening(kind: Any) -> Callable[[Any], Any] | None:
    """Return what makes floats of less than 64 bits the numbers that they are written as.

    kind: the pyarrow type of the values, which may hold such floats inside. None: there are none.
    """
    from pyarrow import types

    if types.is_float32(kind) or types.is_float16(kind):
        narrow = np.dtype(kind.to_pandas_dtype()).type
        return _past_null(lambda value: _shortest(narrow(value)))
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _shortening(kind.value_type)
    if types.is_map(kind):
        name, held = _shortening(kind.key_type) or _as_it_is, _shortening(kind.item_type)
        if held is None:
            return None
        return _past_null(lambda value: {name(key): held(each) for key, each in value.items()})
    if types.is_struct(kind):
        fields = {field.name: short for field in kind if (short := _shortening(field.type))}
        if not fields:
            return None
        return _past_null(
            lambda value: {key: fields.get(key, _as_it_is)(each) for key, each in value.items()}
        )
    of_each = _shortening(kind.value_type) if hasattr(kind, "value_type") else None
    return of_each and _past_null(lambda value: [of_each(each) for each in value])


def _past_null(short: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else short(value)


def _as_it_is(value: Any) -> Any:
    return value
