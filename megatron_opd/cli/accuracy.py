"""The accuracies that frame a run: student before and after, and the teacher it learns from."""

from __future__ import annotations

from typing import Any

from megatron_opd.cli.prepare import Prepared
from megatron_opd.config.schema import Config
from megatron_opd.evaluation import EvaluationPlan, EvaluationReport, FleetPort, evaluate
from sglang_bridge.fleet import Fleet


def evaluation_plan(config: Config) -> EvaluationPlan:
    """How `evaluation` in the config is carried out."""
    return EvaluationPlan(
        samples=config.evaluation.samples,
        temperature=config.evaluation.temperature,
        max_new_tokens=config.evaluation.max_new_tokens or config.rollout.max_new_tokens,
        concurrency=config.rollout.concurrency,
    )


class Accuracies:
    """Evaluates as configured and remembers the reports."""

    def __init__(self, config: Config, prepared: Prepared) -> None:
        self._config, self._prepared = config, prepared
        self._reports: dict[str, EvaluationReport] = {}

    async def before(self, student: Fleet, teacher: Fleet) -> list[str]:
        """Student and teacher before training; a line for each."""
        if not self._config.evaluation.before:
            return []
        return [
            *await self._evaluate("student before", student),
            *await self._evaluate("teacher", teacher),
        ]

    async def after(self, student: Fleet) -> list[str]:
        """The student on the last published weights."""
        if not self._config.evaluation.after:
            return []
        return await self._evaluate("student after", student)

    def summary(self) -> dict[str, Any]:
        """Keys of summary.json; null for what was not evaluated."""
        found = {name: report.accuracy_pct for name, report in self._reports.items()}
        return {
            "student_accuracy_before_pct": found.get("student before"),
            "student_accuracy_after_pct": found.get("student after"),
            "teacher_accuracy_pct": found.get("teacher"),
            "evaluations": {name: report.as_dict() for name, report in self._reports.items()},
        }

    async def _evaluate(self, name: str, fleet: Fleet) -> list[str]:
        prepared = self._prepared
        if not prepared.heldout or prepared.judge is None:
            return []
        plan = evaluation_plan(self._config)
        report = await evaluate(FleetPort(fleet), prepared.heldout, prepared.judge, plan)
        self._reports[name] = report
        return [f"{name}: {report.line()}"]
