"""Reads single rows of JSONL files by the offsets of their lines.

Invariant: of a file only the places of its lines are in memory, and a line is read when it is asked
for. What cannot be sought is unpacked once into a temporary file without a name.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_opd.config.unique_keys import DuplicateKey, unique_keys
from megatron_opd.data.faults import Fault, Unusable

Located = tuple[str, dict[str, Any]]
MAX_LINE_BYTES = 64 * 2**20
"""Longest line of a JSONL file: a file without line ends would fill the memory otherwise."""
CHUNK_BYTES = 2**20
NEWLINE, BRACE = 10, 123


class LineRows:
    """Holds where the lines of a file begin and end. Blank lines are not rows.

    chunks: the bytes of the file in order, read once. file: holds the same bytes, to be sought.
    where: written before the number of a row. by_line: whether that is its line, or counts rows.
    """

    def __init__(
        self, chunks: Iterable[bytes], file: BinaryIO, where: str, *, by_line: bool = True
    ) -> None:
        self._file, self._where, self._by_line = file, where, by_line
        found: list[npt.NDArray[np.int64]] = []
        odd: list[npt.NDArray[np.int64]] = []
        """Lines that do not begin as an object does: they may be blank."""
        size, lines, begins = 0, 0, True
        for chunk in chunks:
            content = np.frombuffer(chunk, np.uint8)
            starts = np.flatnonzero(content == NEWLINE) + 1
            if begins:
                starts = np.concatenate((np.zeros(1, np.int64), starts))
            begins = bool(len(starts)) and int(starts[-1]) == len(content)
            starts = starts[: len(starts) - begins]
            odd.append(lines + np.flatnonzero(content[starts] != BRACE))
            found.append(size + starts)
            size, lines = size + len(content), lines + len(starts)
        self.num_bytes = size
        bounds = np.concatenate([*found, np.array([size])])
        self._starts, self._ends = bounds[:-1], bounds[1:]
        self._lines: npt.NDArray[np.int64] | None = None
        blank = [int(n) for each in odd for n in each if self._is_blank(int(n))]
        if blank:
            kept = np.delete(np.arange(lines), blank)
            self._starts, self._ends, self._lines = bounds[kept], bounds[kept + 1], kept

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> Located | Fault:
        """Return the row of that number, from 0, or its fault."""
        line = number if self._lines is None else int(self._lines[number])
        shown_number = (line if self._by_line else number) + 1
        where = f"{self._where}{shown_number}"
        try:
            return where, json_row(self._text(number, first=line == 0))
        except Unusable as error:
            return error.at(where)

    def __iter__(self) -> Iterator[Located | Fault]:
        return (self.row(number) for number in range(len(self)))

    def _is_blank(self, number: int) -> bool:
        try:
            return not self._text(number, first=number == 0).strip()
        except Unusable:
            return False

    def _text(self, number: int, *, first: bool) -> str:
        start, end = int(self._starts[number]), int(self._ends[number])
        if end - start > MAX_LINE_BYTES:
            raise Unusable(
                "malformed", f"a line may have {MAX_LINE_BYTES} bytes, this one has more"
            )
        written = os.pread(self._file.fileno(), end - start, start)
        try:
            return written.decode("utf-8-sig" if first else "utf-8")
        except UnicodeDecodeError as error:
            raise Unusable("malformed", f"not UTF-8 ({error.reason})") from None


def chunks_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of a file."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def copied(chunks: Iterable[bytes], spool: BinaryIO) -> Iterator[bytes]:
    """Yield chunks as they are written into `spool`."""
    for chunk in chunks:
        spool.write(chunk)
        yield chunk
    spool.flush()


def json_row(text: str) -> dict[str, Any]:
    """Return the object that a line holds. Raises Unusable."""
    try:
        row: Any = json.loads(text, object_pairs_hook=unique_keys)
    except DuplicateKey as error:
        raise Unusable("malformed", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Unusable("malformed", f"malformed JSON ({error})") from None
    if not isinstance(row, dict):
        raise Unusable("malformed", f"must be a JSON object, got {type(row).__name__}")
    return row  # pyright: ignore[reportUnknownVariableType]


def value_lines(path: Path, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each value of a JSON array, or each of several values, as a line of its own.

    ValueError: it is no JSON, or a value is longer than a line may be.
    """
    values, row = _Values(chunks), 0
    try:
        in_array = values.takes("[")
        while not values.at_end():
            if in_array and values.takes("]"):
                if not values.at_end():
                    raise ValueError("the array is followed by more")
                return
            if in_array and row and not values.takes(","):
                raise ValueError("a comma is missing")
            row += 1
            # a line end inside a string is written \n: those that are left stand between values
            yield values.next().replace("\r", " ").replace("\n", " ").encode() + b"\n"
        if in_array:
            raise ValueError("the array does not end")
    except (ValueError, RecursionError) as error:
        why = f"not UTF-8 ({error.reason})" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"{path}: not readable JSON, after row {row}: {why}") from None


class _Values:
    """Reads one JSON value after another from chunks of text."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text, self._place, self._ended = "", 0, False

    def at_end(self) -> bool:
        """Return whether nothing is left but blanks, which are skipped."""
        while True:
            rest = self._text[self._place : self._place + CHUNK_BYTES]
            blanks = len(rest) - len(rest.lstrip(" \t\r\n"))
            self._place += blanks
            if blanks < len(rest):
                return False
            if not rest and not self._more():
                return True

    def takes(self, mark: str) -> bool:
        """Return whether a mark comes next, which is skipped with the blanks before it."""
        there = not self.at_end() and self._text[self._place] == mark
        self._place += there
        return there

    def next(self) -> str:
        """Return the text of the next value."""
        if self.at_end():
            raise ValueError("a value is missing")
        while True:
            try:
                _, end = self._json.raw_decode(self._text, self._place)
                if end < len(self._text) or not self._more():
                    text, self._place = self._text[self._place : end], end
                    return text
            except json.JSONDecodeError:
                if len(self._text) - self._place > MAX_LINE_BYTES:
                    raise ValueError(f"no value ends within {MAX_LINE_BYTES} bytes") from None
                if not self._more():
                    raise

    def _more(self) -> bool:
        """Read as much as is there already, so that a long value is tried few times."""
        if self._ended:
            return False
        parts, wanted = [self._text[self._place :]], max(1, len(self._text) - self._place)
        while wanted > 0 and not self._ended:
            chunk = next(self._chunks, b"")
            self._ended = not chunk
            parts.append(self._decoder.decode(chunk, final=self._ended))
            wanted -= len(parts[-1])
        self._text, self._place = "".join(parts), 0
        return True
