"""Says why a row of a data file cannot be used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """Says why a row cannot be used.

    cause: what such rows are counted by. where: file and line (JSONL) or row (tables), from 1.
    """

    cause: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class BadRows(ValueError):
    """Reports in one line why a run cannot go on with the rows that it draws."""


class Unusable(Exception):
    """Reports a fault of the row that is being read, to whoever knows where the row is."""

    def __init__(self, cause: str, what: str) -> None:
        super().__init__(what)
        self.cause, self.what = cause, what

    def at(self, where: str) -> Fault:
        """Return the fault of the row at `where`."""
        return Fault(self.cause, where, self.what)
