"""A user's own sink, named in a configuration by import path.

metrics: {sinks: ["my_sink:ProgressTable"]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_opd.metrics.own_sinks import RunFacts

COLUMNS = ("update", "reverse_kl_nats", "reward_mean", "accuracy_pct")


class ProgressTable:
    """Keeps a short table of the run in run.dir/progress.csv."""

    def __init__(self, facts: RunFacts) -> None:
        path = facts.directory / "progress.csv"
        # a run that continues has a table already, with rows that are made again after a rollback
        new = facts.updates == 0
        self._file = path.open("w" if new else "a", encoding="utf-8")
        if new:
            print(*COLUMNS, sep=",", file=self._file, flush=True)

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Adds a line for an update. A figure that was not measured is null or not in the row."""
        self._line(row)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Adds a line for an evaluated set."""
        self._line(row)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _line(self, row: Mapping[str, Any]) -> None:
        cells = (row.get(column) for column in COLUMNS)
        line = ("" if cell is None else cell for cell in cells)
        print(*line, sep=",", file=self._file, flush=True)
