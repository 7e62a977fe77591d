"""Reads rows of JSONL and parquet files, and locates every mistake by file and line or row.

Invariant: a row is a record whose columns are what was asked for, or a `Fault` that says why it
cannot be used; no row is lost, and no fault stops the reading of the rows after it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_opd.config.import_path import is_import_path, load_object
from megatron_opd.config.wording import line, shown

SUFFIXES = (".jsonl", ".parquet")
# Above it a float cannot hold every whole number, so its digits may differ from the file's.
WHOLE_FLOATS = 2**53

Record = dict[str, str | None]
Located = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Fault:
    """Says why a row cannot be used.

    cause: what such rows are counted by. where: file and line (JSONL) or row (parquet), from 1.
    """

    cause: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class _Unusable(Exception):
    """Reports a fault of the row being read inside this module."""

    def __init__(self, cause: str, what: str) -> None:
        super().__init__(what)
        self.cause, self.what = cause, what


@dataclass(frozen=True, slots=True)
class Columns:
    """Says which columns to read, and what they must hold.

    texts: non-empty strings. answers: strings or finite numbers (which become text), None where
    missing, null or blank. needed: whether a row without an answer is a fault. choices: texts, and
    the values they may have. reward_weight, teacher_weight: finite numbers >= 0, 1 where missing or
    null, of which one must be above 0; a row of reward weight 0 needs no answer.
    """

    texts: Sequence[str]
    answers: Sequence[str] = ()
    needed: bool = False
    choices: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    reward_weight: str | None = None
    teacher_weight: str | None = None

    @property
    def required(self) -> tuple[str, ...]:
        """Returns the columns that a row must have."""
        needed = self.needed and self.reward_weight is None
        return (*self.texts, *self.choices, *(self.answers if needed else ()))

    @property
    def weights(self) -> tuple[str, ...]:
        """Returns the columns of weights."""
        return tuple(key for key in (self.reward_weight, self.teacher_weight) if key is not None)

    def record(self, row: Mapping[str, Any]) -> Record:
        """Return the named columns of `row`; raises _Unusable."""
        record: Record = {key: _text(row, key) for key in self.texts}
        record |= {key: _chosen(row, key, allowed) for key, allowed in self.choices.items()}
        weights = {key: _weight(row, key) for key in self.weights}
        if len(weights) == 2 and not any(weights.values()):
            raise _Unusable("no_weight", f"{' and '.join(map(repr, weights))} are both 0")
        record |= {key: str(weight) for key, weight in weights.items()}
        needed = self.needed and weights.get(self.reward_weight or "", 1.0) > 0
        return record | {key: _answer(row, key, needed=needed) for key in self.answers}


def scan_records(path: Path, columns: Columns) -> Iterator[tuple[str, Record] | Fault]:
    """Yield (file:line, record) or the fault of every row. Blank JSONL lines are not rows.

    path: a file, or the import path MODULE:FUNCTION of a user's own source. Raises ValueError (one
    line) for what cannot be read at all.
    """
    wanted = list(dict.fromkeys((*columns.required, *columns.answers, *columns.weights)))
    if is_source(path):
        rows = _called(path)
    elif not path.is_file():
        raise ValueError(f"data file not found: {path}")
    elif path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: data files end with {' or '.join(SUFFIXES)}")
    else:
        rows = _jsonl(path) if path.suffix == ".jsonl" else _parquet(path, wanted, columns.required)
    for row in rows:
        if isinstance(row, Fault):
            yield row
            continue
        where, values = row
        try:
            yield where, columns.record(values)
        except _Unusable as error:
            yield Fault(error.cause, where, error.what)


def read_records(path: Path, texts: Sequence[str]) -> list[dict[str, str]]:
    """Return the columns `texts` of every row.

    ValueError names the first row that is not usable.
    """
    records: list[dict[str, str]] = []
    for row in scan_records(path, Columns(texts)):
        if isinstance(row, Fault):
            raise ValueError(str(row))
        records.append({key: str(value) for key, value in row[1].items()})
    if not records:
        raise ValueError(f"{path} holds no rows")
    return records


def is_source(path: Path) -> bool:
    """Tell whether a data path names a function, MODULE:FUNCTION, and not a file."""
    return is_import_path(str(path)) and not path.exists()


def data_crc32(path: Path) -> int:
    """Returns the checksum of a data file's bytes, or of the rows of a source."""
    if not is_source(path):
        return zlib.crc32(path.read_bytes())
    crc = 0
    for row in _called(path):
        crc = zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode(), crc)
    return crc


def _called(path: Path) -> Iterator[Located]:
    """Yields the rows of a user's own source: a function that returns the same ones every time."""
    source = load_object(str(path))
    try:
        for number, row in enumerate(source(), start=1):
            yield f"{path}:{number}", dict(row)
    except Exception as error:  # noqa: BLE001  whatever a user's function raises is told in one line
        raise ValueError(f"{path} failed: {type(error).__name__}: {line(error)}") from None


def _jsonl(path: Path) -> Iterator[Located | Fault]:
    try:
        with path.open("rb") as file:
            for number, written in enumerate(file, start=1):
                where = f"{path}:{number}"
                try:
                    row = _json_row(written, first=number == 1)
                except _Unusable as error:
                    yield Fault(error.cause, where, error.what)
                    continue
                if row is not None:
                    yield where, row
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _json_row(written: bytes, *, first: bool) -> dict[str, Any] | None:
    try:
        text = written.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise _Unusable("malformed", f"not UTF-8 ({error.reason})") from None
    if not text.strip():
        return None
    try:
        row: Any = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _Unusable("malformed", f"malformed JSON ({error})") from None
    if not isinstance(row, dict):
        raise _Unusable("malformed", f"must be a JSON object, got {type(row).__name__}")
    return row  # pyright: ignore[reportUnknownVariableType]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object whose keys occur once; json would silently take the second of two values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Unusable("malformed", f"key {shown(twice)} is given twice")
    return found


def _parquet(path: Path, wanted: Sequence[str], required: Sequence[str]) -> Iterator[Located]:
    import pyarrow
    from pyarrow import parquet

    try:
        present: list[str] = parquet.read_schema(path).names
        for key in wanted:
            if present.count(key) > 1:
                raise ValueError(f"column {key!r} occurs {present.count(key)} times")
        table = parquet.read_table(path, columns=[key for key in wanted if key in present])
        table.validate(full=True)  # offsets beyond the data would be read
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({line(error)})") from None
    for key in required:
        if key not in present:
            raise ValueError(f"{path}: missing column {key!r}; the columns are {_names(present)}")
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", row


def _text(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        raise _Unusable("missing", f"missing column {key!r}; the columns are {_names(row)}")
    if not isinstance(row[key], str):
        raise _Unusable("wrong_type", f"{key!r} must be a string, got {type(row[key]).__name__}")
    if not row[key].strip():
        raise _Unusable("empty", f"{key!r} is empty")
    return _unicode(row[key], key)


def _names(columns: Collection[str]) -> str:
    """Return the first few names, for people."""
    return ", ".join(shown(name, 40) for name in sorted(columns)[:8]) or "none"


def _chosen(row: Mapping[str, Any], key: str, allowed: Collection[str]) -> str:
    value = _text(row, key)
    if value not in allowed:
        names = ", ".join(sorted(allowed))
        raise _Unusable("unknown_teacher", f"{key!r} must be one of {names}, got {shown(value)}")
    return value


def _answer(row: Mapping[str, Any], key: str, *, needed: bool) -> str | None:
    value = row.get(key)
    if isinstance(value, str):
        text = _unicode(value, key)
    elif value is None:
        text = ""
    elif isinstance(value, int | float) and not isinstance(value, bool):
        text = _number(value, key)
    else:
        raise _Unusable(
            "wrong_type", f"{key!r} must be a string or number, got {type(value).__name__}"
        )
    if text.strip():
        return text
    if needed:
        why = f"{key!r} is empty" if key in row else f"missing column {key!r}"
        raise _Unusable("no_answer", why)
    return None


def _weight(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unusable("wrong_type", f"{key!r} must be a number, got {type(value).__name__}")
    if not (0 <= value < math.inf):
        raise _Unusable("bad_weight", f"{key!r} must be finite and >= 0, got {str(value)[:20]}")
    return float(value)


def _number(value: int | float, key: str) -> str:
    """Write a number as a reader does: a column of floats, as pandas makes, holds 42 as 42.0."""
    if not math.isfinite(value) if isinstance(value, float) else value.bit_length() > 4096:
        raise _Unusable("not_finite", f"{key!r} must be a finite number, got {str(value)[:20]}")
    if isinstance(value, float) and value.is_integer() and abs(value) <= WHOLE_FLOATS:
        return str(int(value))
    return str(value)


def _unicode(text: str, key: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
        raise _Unusable("wrong_type", f"{key!r} is not valid Unicode ({error.reason})") from None
    return text
