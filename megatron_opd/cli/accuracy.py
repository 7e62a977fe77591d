"""Measures the accuracies before and after a run: of the student, and of its teachers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_opd.cli.prepare import Prepared
from megatron_opd.cli.roles import teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.config.sections import DEFAULT_TEACHER
from megatron_opd.evaluation import EvaluationPlan, EvaluationReport, FleetPort, evaluate
from sglang_bridge.fleet import Fleet


def evaluation_plan(config: Config) -> EvaluationPlan:
    """Return how the evaluation of the config is carried out."""
    return EvaluationPlan(
        samples=config.evaluation.samples,
        temperature=config.evaluation.temperature,
        max_new_tokens=config.evaluation.max_new_tokens or config.rollout.max_new_tokens,
        concurrency=config.rollout.concurrency,
        seed=config.run.seed,
    )


def report_name(teacher: str) -> str:
    """Return the name of a teacher's evaluation."""
    return teacher if teacher == DEFAULT_TEACHER else f"teacher {teacher}"


class Accuracies:
    """Evaluates as configured and remembers the reports."""

    def __init__(self, config: Config, prepared: Prepared) -> None:
        self._config, self._prepared = config, prepared
        self._reports: dict[str, EvaluationReport] = {}
        self._teachers: tuple[str, ...] = ()

    async def before(self, student: Fleet, teachers: Mapping[str, Fleet]) -> list[str]:
        """Evaluate the student and every teacher, by name, before training.

        Returns a line for each.
        """
        if not self._config.evaluation.before:
            return []
        self._teachers = tuple(teachers)
        lines = await self._evaluate("student before", student)
        for name, fleet in teachers.items():
            lines += await self._evaluate(report_name(name), fleet)
        return lines

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Take over what an earlier attempt of this run found before training."""
        for name, fields in summary["evaluations"].items():
            undefined = math.nan if fields["stderr_pct"] is None else fields["stderr_pct"]
            self._reports[name] = EvaluationReport(**{**fields, "stderr_pct": undefined})
        self._teachers = tuple(teacher_roles(self._config))

    async def after(self, student: Fleet) -> list[str]:
        """Evaluate the student on the weights of the last weight sync."""
        if not self._config.evaluation.after:
            return []
        return await self._evaluate("student after", student)

    def summary(self) -> dict[str, Any]:
        """Return the keys of summary.json, null for what was not evaluated."""
        found = {name: report.accuracy_pct for name, report in self._reports.items()}
        by_name = {name: found.get(report_name(name)) for name in self._teachers}
        several = {} if set(by_name) <= {DEFAULT_TEACHER} else by_name
        return {
            "student_accuracy_before_pct": found.get("student before"),
            "student_accuracy_after_pct": found.get("student after"),
            "teacher_accuracy_pct": by_name.get(DEFAULT_TEACHER),
            **({"teacher_accuracy_pct_by_name": several} if several else {}),
            "evaluations": {name: report.as_dict() for name, report in self._reports.items()},
        }

    async def _evaluate(self, name: str, fleet: Fleet) -> list[str]:
        prepared = self._prepared
        if not prepared.heldout or prepared.judge is None:
            return []
        plan = evaluation_plan(self._config)
        port = FleetPort(fleet, self._config.rollout.attempts)
        report = await evaluate(port, prepared.heldout, prepared.judge, plan)
        self._reports[name] = report
        return [f"{name}: {report.line()}"]
