"""Records what the evaluations of a run found, and reads from it what is best.

A checkpoint keeps Progress as JSON: every row so far, and the updates whose evaluation had begun or
was due and was not complete. Whoever continues from it writes these rows again and evaluates those
updates anew, so that each (update, set) has exactly one row, however often the run was interrupted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_opd.config.evaluation import ACCURACY, PASS_AT
from megatron_opd.evaluation.reports import EvaluationReport, TurnMeans
from megatron_opd.metrics.sinks import json_ready

NOT_OF_THE_REPORT = ("update", "set", "lag_steps", "seconds", "time_s", "unix_time_s")
BY_K = ("pass_at_k", "pass_at_k_stderr_pct")
OF_TURNS = tuple(each.name for each in fields(TurnMeans))
"""Keys of rows whose answers are trajectories; the others have none of them."""
OF_ALL = tuple(each.name for each in fields(EvaluationReport) if each.name != "turns")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Holds the evaluation of one set.

    update: updates that the weights had seen when it began. lag_steps: updates that the learner
    made until it ended. seconds: that it took. time_s: at its end, since training began.
    """

    update: int
    set: str
    lag_steps: int
    seconds: float
    time_s: float
    unix_time_s: float
    report: EvaluationReport

    def row(self) -> dict[str, Any]:
        """Return the row of evaluations.jsonl."""
        report = self.report.as_dict()
        head = {"update": self.update, "set": self.set}
        for key in ("version_min", "version_max"):
            head[key] = report.pop(key)
        return {
            **head,
            "lag_steps": self.lag_steps,
            **report,
            "seconds": self.seconds,
            "time_s": self.time_s,
            "unix_time_s": self.unix_time_s,
        }


def evaluated_from(row: Mapping[str, Any]) -> Evaluated:
    """Return what `Evaluated.row` wrote. ValueError: it is not such a row."""
    try:
        played = [key for key in OF_TURNS if key in row]
        report = report_from({key: row[key] for key in (*OF_ALL, *played)})
        found = Evaluated(**{key: row[key] for key in NOT_OF_THE_REPORT}, report=report)
        whole = (found.update, found.lag_steps)
        times = (found.seconds, found.time_s, found.unix_time_s)
        if not all(type(n) is int and n >= 0 for n in whole) or not isinstance(found.set, str):
            raise ValueError("update, set or lag_steps is malformed")
        if not all(type(n) in (int, float) and math.isfinite(n) for n in times):
            raise ValueError("a time is malformed")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the row of an evaluation: {error!r}") from None
    return found


def report_from(found: Mapping[str, Any]) -> EvaluationReport:
    """Return what `EvaluationReport.as_dict` wrote; null errors are nan.

    ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    known = dict(found)
    for key in BY_K:
        known[key] = {int(k): _number(each) for k, each in found[key].items()}
    known["stderr_pct"] = _number(found["stderr_pct"])
    if any(key in known for key in OF_TURNS):
        known["turns"] = TurnMeans(**{key: _number(known.pop(key)) for key in OF_TURNS})
    report = EvaluationReport(**known)
    for figure in (report.accuracy_pct, report.mean_response_tokens, report.truncated_pct):
        if type(figure) not in (int, float):
            raise ValueError(f"a figure must be a number, got {figure!r}")
    return report


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float):
        raise ValueError(f"a figure must be a number or null, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a figure must be below 1.8e308") from None


@dataclass(frozen=True, slots=True)
class EvaluationProgress:
    """Holds all that is known of a run's evaluations.

    rows: of the student, in the order in which they ended. pending: updates whose evaluation is due
    and not complete. skipped: evaluations left out because another one was running. failed: sets
    that could not be evaluated. teachers: {name: {set: report}}, before the run.
    """

    rows: tuple[Evaluated, ...] = ()
    pending: tuple[int, ...] = ()
    skipped: int = 0
    failed: int = 0
    teachers: Mapping[str, Mapping[str, EvaluationReport]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "rows": [row.row() for row in self.rows],
            "pending": list(self.pending),
            "skipped": self.skipped,
            "failed": self.failed,
            "teachers": {
                name: {each: report.as_dict() for each, report in reports.items()}
                for name, reports in self.teachers.items()
            },
        }


def progress_from(kept: Mapping[str, Any]) -> EvaluationProgress:
    """Return what a checkpoint kept. ValueError: it is damaged."""
    try:
        counts = [kept["skipped"], kept["failed"], *kept["pending"]]
        if not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError(f"counts must be whole numbers, got {counts!r}")
        return EvaluationProgress(
            rows=tuple(evaluated_from(row) for row in kept["rows"]),
            pending=tuple(kept["pending"]),
            skipped=kept["skipped"],
            failed=kept["failed"],
            teachers={
                name: {each: report_from(report) for each, report in reports.items()}
                for name, reports in kept["teachers"].items()
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"evaluations are damaged: {error!r}") from None


def value_of(report: EvaluationReport, metric: str) -> float | None:
    """Return the figure that `metric` names (evaluation.best_metric); None: it has no such."""
    if metric == ACCURACY:
        return report.accuracy_pct
    return report.pass_at_k.get(int(metric.removeprefix(PASS_AT)))


def best_of(rows: Iterable[Evaluated], metric: str) -> Evaluated | None:
    """Return the row with the largest figure, the earliest of several; None without any."""
    best: tuple[float, Evaluated] | None = None
    for row in sorted(rows, key=lambda row: row.update):
        value = value_of(row.report, metric)
        if value is not None and (best is None or value > best[0]):
            best = value, row
    return None if best is None else best[1]


def without_gain(rows: Sequence[Evaluated], metric: str, min_delta_pct: float) -> int:
    """Return how many of the last evaluations in a row brought no gain.

    A gain exceeds the figure of the last gain by more than min_delta_pct; the first is one.
    """
    reference, count = -math.inf, 0
    for row in sorted(rows, key=lambda row: row.update):
        value = value_of(row.report, metric)
        if value is None:
            continue
        if value > reference + min_delta_pct:
            reference, count = value, 0
        else:
            count += 1
    return count


def rows_of(progress: EvaluationProgress) -> str:
    """Return the content of evaluations.jsonl that a checkpoint stands for."""
    return "".join(f"{_line(row)}\n" for row in progress.rows)


def _line(row: Evaluated) -> str:
    return json.dumps(json_ready(row.row()), allow_nan=False)
