"""Reads what a process holds, and says whether it grew."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIB = 1 << 20
BLOCKS = 10
"""Parts of the time whose means give the slope: looks one after another are not independent."""


@dataclass(frozen=True, slots=True)
class Look:
    """Holds what a process has at a moment, in MiB. private: pages that it alone has written."""

    at_s: float
    private: float
    pss: float
    rss: float


def look(pid: int, at_s: float) -> Look:
    """Return what a process has now."""
    found = {"Private_Dirty:": 0, "Pss:": 0, "Rss:": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, kib, *_ = line.split()
        if name in found:
            found[name] = int(kib)
    private, pss, rss = (kib * 1024 / MIB for kib in found.values())
    return Look(at_s, private, pss, rss)


def open_sockets(pid: int) -> int:
    """Return how many sockets a process has open."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(entry).startswith("socket:")
    return count


def slope(looks: Sequence[Look], name: str) -> tuple[float, float]:
    """Return (slope, its standard error) of a column in KiB/s, by least squares."""
    parts = np.array_split(np.array([(each.at_s, getattr(each, name)) for each in looks]), BLOCKS)
    at_B, kib_B = np.array([part.mean(axis=0) for part in parts]).T * ((1,), (1024,))
    around_B = at_B - at_B.mean()
    rate = float(around_B @ kib_B / (around_B @ around_B))
    rest_B = kib_B - kib_B.mean() - rate * around_B
    error = float(np.sqrt(rest_B @ rest_B / (BLOCKS - 2) / (around_B @ around_B)))
    return rate, error
