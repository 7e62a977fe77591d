"""Reads from a run's figures what is wrong with it, and says in plain words what to do.

Thresholds are rules of thumb. Those of single columns stand in the catalogue of metrics; the rules
compare columns, the begin of a run with its end, or a run with its configuration.
"""

from __future__ import annotations

import time

from megatron_opd.report import rules_learning, rules_run, rules_speed
from megatron_opd.report.facts import Facts, Finding, Rule
from megatron_opd.report.figures import run_figures
from megatron_opd.report.run_data import RunData

RULES: tuple[Rule, ...] = (
    rules_run.ended,
    rules_run.silent,
    rules_learning.no_number,
    rules_learning.nothing_learnt,
    rules_speed.idle,
    rules_learning.trends,
    rules_learning.truncated,
    rules_learning.hints,
    rules_speed.syncing,
    rules_run.dropped,
    rules_run.servers,
    rules_learning.ranges,
    rules_run.files,
)


def findings_of(run: RunData, now_s: float | None = None) -> tuple[Finding, ...]:
    """Return what is wrong with a run, the worst first. now_s: seconds since 1970."""
    facts = Facts(run, run_figures(run), time.time() if now_s is None else now_s)
    found = [finding for rule in RULES for finding in rule(facts)]
    return tuple(sorted(found, key=lambda each: each.level != "bad"))
