"""Reads files that a run appends to, a piece at a time, without ever disturbing the run.

Nothing is written, locked or renamed. A line counts once its newline is on the disk: the torn last
line of a killed run is never returned, and that of a running one is returned when it is whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

MOST_BYTES = 16 * 2**20
"""Bytes that one call reads at most: one row must fit."""
_MARK_BYTES = 128


@dataclass(frozen=True, slots=True)
class Line:
    """Holds one complete line without its newline, and where it begins in the file (bytes)."""

    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class NewLines:
    """Holds what one call found.

    started_over: the file is another one than before (a run that was resumed, rolled back or begun
    anew), so what earlier calls returned no longer holds. more: call again, there is more.
    """

    lines: tuple[Line, ...]
    started_over: bool
    more: bool


@dataclass(frozen=True, slots=True)
class NewRows:
    """Holds the JSON objects of NewLines, each with its line's offset.

    damaged: lines that are no JSON object, which are left out.
    """

    rows: tuple[dict[str, Any], ...]
    offsets: tuple[int, ...]
    damaged: int
    started_over: bool
    more: bool


class AppendedLines:
    """Reads the lines of one file that have come since the last call.

    Args:
        path: the file; it need not exist yet, and may be replaced by a shorter one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._head = self._tail = b""

    def read(self, most_bytes: int = MOST_BYTES) -> NewLines:
        """Return new lines of at most `most_bytes` bytes. May raise OSError.

        A missing file has no lines. A line longer than `most_bytes` is skipped.
        """
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            return NewLines((), self._start_over(), more=False)
        with stream:
            started_over = not self._is_same(stream) and self._start_over()
            size = os.fstat(stream.fileno()).st_size
            stream.seek(self._offset)
            content = stream.read(most_bytes)
            end = content.rfind(b"\n") + 1
            if not end and len(content) == most_bytes:
                end = self._skip(stream, content)
                lines: tuple[Line, ...] = ()
            else:
                lines = _split(content[:end], self._offset)
            self._offset += end
            self._remember(stream)
        more = bool(end) and len(content) == most_bytes and self._offset < size
        return NewLines(lines, started_over, more)

    def _skip(self, stream: BinaryIO, content: bytes) -> int:
        """Return how many bytes the long line at the offset has; 0: its end is not there yet."""
        length = len(content)
        while piece := stream.read(MOST_BYTES):
            found = piece.find(b"\n")
            if found >= 0:
                return length + found + 1
            length += len(piece)
        return 0

    def _is_same(self, stream: BinaryIO) -> bool:
        """Return whether what was read is still there: a new file may have the old one's inode."""
        head = stream.read(len(self._head))
        stream.seek(self._offset - len(self._tail))
        return head == self._head and stream.read(len(self._tail)) == self._tail

    def _remember(self, stream: BinaryIO) -> None:
        stream.seek(0)
        self._head = stream.read(min(_MARK_BYTES, self._offset))
        stream.seek(max(0, self._offset - _MARK_BYTES))
        self._tail = stream.read(min(_MARK_BYTES, self._offset))

    def _start_over(self) -> bool:
        """Forget what was read; return whether that was anything."""
        had_some = self._offset > 0
        self._offset, self._head, self._tail = 0, b"", b""
        return had_some


class AppendedRows:
    """Reads the rows of a file with one JSON object per line; see AppendedLines."""

    def __init__(self, path: Path) -> None:
        self._lines = AppendedLines(path)

    @property
    def path(self) -> Path:
        """Returns the file."""
        return self._lines.path

    def read(self, most_bytes: int = MOST_BYTES) -> NewRows:
        """Return the rows that have come since the last call. May raise OSError."""
        found = self._lines.read(most_bytes)
        rows: list[dict[str, Any]] = []
        offsets: list[int] = []
        for line in found.lines:
            row = parse_row(line.content)
            if row is not None:
                rows.append(row)
                offsets.append(line.offset)
        damaged = len(found.lines) - len(rows)
        return NewRows(tuple(rows), tuple(offsets), damaged, found.started_over, found.more)

    def read_all(self) -> NewRows:
        """Return all rows up to the present end, as if read in one call. May raise OSError."""
        rows: list[dict[str, Any]] = []
        offsets: list[int] = []
        damaged, started_over, more = 0, False, True
        while more:
            found = self.read()
            if found.started_over:
                rows, offsets, damaged, started_over = [], [], 0, True
            rows += found.rows
            offsets += found.offsets
            damaged += found.damaged
            more = found.more
        return NewRows(tuple(rows), tuple(offsets), damaged, started_over, more=False)


def parse_row(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, None when it is none."""
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):  # no JSON, no text, or nested without end
        return None
    return cast(dict[str, Any], row) if isinstance(row, dict) else None


def _split(content: bytes, offset: int) -> tuple[Line, ...]:
    lines: list[Line] = []
    for line in content.split(b"\n")[:-1]:
        lines.append(Line(offset, line))
        offset += len(line) + 1
    return tuple(lines)
