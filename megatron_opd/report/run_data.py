"""Loads everything that the report shows of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opd.report.config_diff import Resolved, resolve
from megatron_opd.report.lanes import ReportTimeline, timeline_of
from megatron_opd.report.run_files import LogFile, NotARun, RunFiles
from megatron_opd.report.series import Table, table_of
from megatron_opd.report.servers import ServerTotals, server_totals
from megatron_opd.report.state import RunState
from megatron_opd.report.trace_file import TraceFile


@dataclass(frozen=True, slots=True)
class RunData:
    """Holds one run as it was when it was read.

    name: unique among the runs of a report. summary: None while there is none. written_s: when the
    run last wrote (seconds since 1970). damaged: lines of its files that could not be read.
    """

    name: str
    path: Path
    state: RunState
    summary: Mapping[str, Any] | None
    table: Table
    evaluations: tuple[Mapping[str, Any], ...]
    servers: tuple[ServerTotals, ...]
    timeline: ReportTimeline | None
    config: Resolved | None
    changes: tuple[Mapping[str, Any], ...]
    logs: tuple[LogFile, ...]
    written_s: float | None
    damaged: int

    @property
    def simulated(self) -> bool:
        """Returns whether `opd simulate` made the run."""
        return bool(self.summary and self.summary.get("simulated"))

    def setting(self, key: str) -> str | None:
        """Return a dotted key of the configuration as text; None: it has no such key."""
        return None if self.config is None else self.config.all.get(key)


def load_runs(paths: Sequence[Path]) -> tuple[RunData, ...]:
    """Read runs. NotARun, in one line: a path is no run, is given twice, or holds nothing yet."""
    for path in paths:
        if [each.resolve() for each in paths].count(path.resolve()) > 1:
            raise NotARun(f"{path} is given twice; name each run once")
    return tuple(
        _load(RunFiles(path), name) for path, name in zip(paths, names_of(paths), strict=True)
    )


def names_of(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return short names that tell the runs apart: as many last parts of the paths as needed."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return tuple(names)


def _load(files: RunFiles, name: str) -> RunData:
    try:
        rows = files.metrics.read_all()
        evaluations = files.evaluations.read_all()
        traces = [TraceFile(path) for path in files.traces()]
        for trace in traces:
            trace.read()
    except OSError as error:
        raise NotARun(f"{error.filename or files.path} cannot be read: {error.strerror}") from None
    summary, tree = files.summary(), files.config()
    table = table_of(rows.rows)
    if not len(table) and summary is None:
        raise NotARun(f"{files.path}: the run has made no update yet, so there is nothing to show")
    return RunData(
        name=name,
        path=files.path,
        state=files.state(),
        summary=summary,
        table=table,
        evaluations=_latest(evaluations.rows),
        servers=server_totals(rows.rows),
        timeline=timeline_of(traces, table),
        config=None if tree is None else resolve(tree),
        changes=files.changes(),
        logs=files.logs(),
        written_s=files.written_s(),
        damaged=rows.damaged + evaluations.damaged + sum(trace.damaged for trace in traces),
    )


def _latest(rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the last row of each update and set: a resumed run may evaluate one again."""
    found = {(str(row.get("update")), str(row.get("set"))): row for row in rows}
    return tuple(found.values())
