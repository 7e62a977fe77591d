"""Holds all that is known of a watched run, and reads on as its files grow.

Nothing is written, locked or renamed: the run cannot notice. Use from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_opd.metrics.catalogue import metric_of
from megatron_opd.metrics.sinks import json_ready
from megatron_opd.report.appended import AppendedRows
from megatron_opd.report.run_files import ROLLOUTS, TRACE, RunFiles
from megatron_opd.report.series import Table, points_of, table_of
from megatron_opd.watch.lanes import BusyLanes
from megatron_opd.watch.rollout_index import RolloutIndex

NOT_CURVES = ("update", "time_s", "unix_time_s", "first_uid", "last_uid", "version")
"""Columns that only rise with the run."""


class RowList:
    """Keeps the rows of one file in memory: one per update, or per evaluation."""

    def __init__(self, rows: AppendedRows) -> None:
        self._appended = rows
        self.rows: list[dict[str, Any]] = []
        self.epoch = 0
        """Rises when the file was replaced."""

    def read(self) -> bool:
        """Take the new rows; return whether there are more. May raise OSError."""
        found = self._appended.read()
        if found.started_over:
            self.rows = []
            self.epoch += 1
        self.rows += found.rows
        return found.more


class Watched:
    """Reads one run as it grows.

    Args:
        files: the run's directory.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.metrics = RowList(files.metrics)
        self.evaluations = RowList(files.evaluations)
        self.rollouts = RolloutIndex(files.path / ROLLOUTS)
        self.lanes = BusyLanes(files.path / TRACE)
        self._table: tuple[tuple[int, int], Table] | None = None

    def read(self) -> bool:
        """Read a piece of what is new; return whether there is more. May raise OSError."""
        parts = (self.metrics, self.evaluations, self.rollouts, self.lanes)
        more = [part.read() for part in parts]  # of every one, whatever the others have
        return any(more)

    def state(self) -> dict[str, Any]:
        """Return the state of the run, its last figures, and what there is to ask for."""
        config, state = self.files.config() or {}, self.files.state()
        last = self.metrics.rows[-1] if self.metrics.rows else {}
        counts = {
            "updates": len(self.metrics.rows),
            "evaluations": len(self.evaluations.rows),
            "rollouts": len(self.rollouts),
        }
        epochs = (self.metrics.epoch, self.evaluations.epoch, self.rollouts.epoch)
        return json_ready(
            {
                "run": self.files.path.absolute().name,
                **asdict(state),
                "written_s": self.files.written_s(),
                "max_updates": _at(config, "run", "max_steps"),
                "student": _at(config, "student", "model"),
                "objective": _at(config, "objective", "type"),
                "schedule": _at(config, "schedule", "type"),
                "last": {key: value for key, value in last.items() if key != "servers"},
                "servers": last.get("servers"),
                "counts": counts,
                "epochs": list(epochs),
                "columns": [_described(c) for c in self.table().columns if c not in NOT_CURVES],
                "teachers": self.rollouts.teachers,
                "drop_reasons": [reason for reason in self.rollouts.drop_reasons if reason],
                "damaged_rollouts": self.rollouts.damaged,
                "end_s": self.lanes.end_s,
            }
        )

    def table(self) -> Table:
        """Return all rows of metrics.jsonl as columns; made anew when there are more."""
        known = (self.metrics.epoch, len(self.metrics.rows))
        if self._table is None or self._table[0] != known:
            self._table = (known, table_of(self.metrics.rows))
        return self._table[1]

    def curves(self, columns: tuple[str, ...]) -> dict[str, Any]:
        """Return these columns, as many points as a chart shows: {update, time_s, columns}."""
        table = self.table()
        wanted = {name: table.columns[name] for name in columns if name in table.columns}
        points = points_of(Table(table.update_R, table.time_s_R, wanted))
        return {"update": points.update_P, "time_s": points.time_s_P, "columns": points.columns}


def _described(column: str) -> dict[str, Any]:
    """Return what the catalogue says of a column. low, high: of a healthy run, None: no bound."""
    metric = metric_of(column)
    if metric is None:
        return {"name": column, "unit": "", "text": "", "low": None, "high": None, "action": ""}
    healthy = metric.healthy
    return {
        "name": column,
        "unit": metric.unit,
        "text": metric.text,
        "low": None if healthy is None else healthy.low,
        "high": None if healthy is None else healthy.high,
        "action": metric.action,
    }


def _at(tree: Mapping[str, Any], section: str, key: str) -> Any:
    found = tree.get(section)
    return found.get(key) if isinstance(found, dict) else None
