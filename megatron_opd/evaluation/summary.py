"""Makes the keys of summary.json on evaluations."""

from __future__ import annotations

from typing import Any

from megatron_opd.config.sections import DEFAULT_TEACHER
from megatron_opd.evaluation.evaluations import Evaluations, in_words
from megatron_opd.evaluation.progress import Evaluated
from megatron_opd.evaluation.reports import EvaluationReport


def summary_of(found: Evaluations, after: int | None) -> dict[str, Any]:
    """Return the keys of summary.json on evaluations; null for what was not evaluated.

    after: updates of the run, once its last weights were evaluated.
    student_accuracy_*, teacher_accuracy_*: of the set that says what is best. evaluation_sets:
    {set: {before, after, best, last: row of evaluations.jsonl}}.
    """
    by_set = {name: _picked(found, name, after) for name in found.sets}
    best_set = found.best_set or ""
    main = by_set.get(best_set, {})
    of_teachers = {
        name: reports[best_set].accuracy_pct
        for name, reports in found.teachers.items()
        if best_set in reports
    }
    alone = set(of_teachers) <= {DEFAULT_TEACHER}
    return {
        "student_accuracy_before_pct": _accuracy(main.get("before")),
        "student_accuracy_after_pct": _accuracy(main.get("after")),
        "teacher_accuracy_pct": of_teachers.get(DEFAULT_TEACHER),
        **({} if alone else {"teacher_accuracy_pct_by_name": of_teachers}),
        "evaluations": {name: each.as_dict() for name, each in _reports(found, by_set).items()},
        "evaluation_sets": {
            name: {when: None if row is None else row.row() for when, row in picked.items()}
            for name, picked in by_set.items()
        },
        "evaluations_skipped": found.skipped,
        "evaluations_failed": found.failed,
        "stopped_early_at": found.stopped_at,
    }


Picked = dict[str, Evaluated | None]


def _picked(found: Evaluations, name: str, after: int | None) -> Picked:
    rows = {row.update: row for row in found.rows if row.set == name}
    return {
        "before": rows.get(0),
        "after": None if after is None else rows.get(after),
        "best": found.best(name),
        "last": rows[max(rows)] if rows else None,
    }


def _reports(found: Evaluations, by_set: dict[str, Picked]) -> dict[str, EvaluationReport]:
    """Return the reports before and after the run by what the user is told."""
    reports: dict[str, EvaluationReport] = {}
    for name, picked in by_set.items():
        on = f" on {name}" if len(by_set) > 1 else ""
        for when in ("before", "after"):
            if (row := picked[when]) is not None:
                reports[f"student {when}{on}"] = row.report
        for teacher, of_teacher in found.teachers.items():
            if name in of_teacher:
                reports[f"{in_words(teacher)}{on}"] = of_teacher[name]
    return reports


def _accuracy(row: Evaluated | None) -> float | None:
    return None if row is None else row.report.accuracy_pct
