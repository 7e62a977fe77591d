"""The case file of `opd objective`."""

from __future__ import annotations

import json
import math
from typing import Any

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_json
from checks.fuzz.places import written
from harness.tree import ROOT
from megatron_opd.cli.objective_case import objective_report
from megatron_opd.config.load import ConfigError
from megatron_opd.errors import UserError

CORPUS = [json.loads(file.read_bytes()) for file in sorted(ROOT.glob("examples/objective/*.json"))]


def call(data: bytes) -> dict[str, Any]:
    """Evaluate the loss."""
    return objective_report(written("case.json", data))


def oracle(data: bytes, report: dict[str, Any]) -> str | None:
    """Every figure of the answer is finite, so that it is strict JSON."""
    figures = [report["loss"], *report["grad_student_logp"], *report["metrics"].values()]
    return None if all(map(math.isfinite, figures)) else "a figure is not finite"


TARGET = Target("objective_case", damaged_json(CORPUS), call, (UserError, ConfigError), oracle)
