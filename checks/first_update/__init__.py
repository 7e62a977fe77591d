"""What learner.mismatch_limit catches, and what it must not: planted divergences, healthy runs.

    python -m checks first_update [--only WORD] [--limit N]

Every case starts a real SGLang server and lets `opd run` make one update with it (student.urls).
Where a divergence is planted, student.model holds what the server is to load until it is up, and
the learner's checkpoint from then on: so no check of config.json or of tensors stands before the
bound.

not_judged: runs whose settings have no limits, so that nothing was compared.
caught: planted divergences whose run ended with exit code 2 before an update. false_alarms: healthy
runs that did not finish, and `recorded` figures beyond their limits: every layout, number format
and replay of mismatch_grid.json, each first update of the studies' rows (exact, int8 and fp8
samplers), and the 20 updates of each run of routing.json. Models are tiny and random, with peaked
output; embeddings have the deviation of a trained model's (0.02), on which eps acts.

Rows are kept in runs/first_update/rows.jsonl; stopped, it goes on where it was.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checks.first_update.cases import Case, all_cases
from checks.first_update.recorded import recorded
from harness.case_rows import (
    case_parser,
    fingerprint_of,
    own_directory,
    run_commits,
    run_missing,
    run_program,
)

ROWS = Path("runs") / "first_update" / "rows.jsonl"
LIMIT_S = 600.0
Tree = dict[str, Any]


def measure(options: Sequence[str] = (), *, rows: Path = ROWS) -> Tree:
    """Run what is missing; every case by name, what was caught, and what was alarmed falsely."""
    arguments = case_parser("python -m checks first_update").parse_args(list(options))
    cases = [case for case in all_cases() if arguments.only in case.name]
    prints = {case.name: fingerprint_of(asdict(case), "checks/first_update") for case in cases}
    with tempfile.TemporaryDirectory(prefix="opd-first-update-") as directory:

        def run(name: str) -> Tree:
            own, module = own_directory(Path(directory)), "checks.first_update.case"
            return {"figures": run_program(module, {"name": name}, own, limit_s=LIMIT_S)}

        return outcome(cases, run_missing(prints, run, rows, arguments.limit))


def outcome(cases: Sequence[Case], kept: dict[str, Tree]) -> Tree:
    """What the rows and the records say."""
    planted = [case for case in cases if case.plant is not None and case.name in kept]
    healthy = [case for case in cases if case.plant is None and case.name in kept]
    caught = [case.name for case in planted if is_caught(kept[case.name]["figures"])]
    unjudged = [case.name for case in healthy if is_unjudged(kept[case.name]["figures"])]
    finished = {case.name for case in healthy if is_finished(kept[case.name]["figures"])}
    alarms = [case.name for case in healthy if case.name not in {*unjudged, *finished}]
    records = recorded()
    return {
        "run_commits": run_commits(kept.values()),
        "missing": [case.name for case in cases if case.name not in kept],
        "planted": len(planted),
        "caught": len(caught),
        "not_caught": sorted({case.name for case in planted} - set(caught)),
        "healthy": len(healthy),
        "not_judged": unjudged,
        "recorded": len(records),
        "false_alarms": alarms + [each["name"] for each in records if not each["within"]],
        "closest": closest(records),
        "seconds": {name: row["seconds"] for name, row in kept.items()},
        "cases": {name: row["figures"] for name, row in kept.items()},
    }


def is_caught(figures: Tree) -> bool:
    """Whether the run was refused by the bound, and made no update."""
    refused = figures["verdict"] == "exceeds limits" and figures["updates"] == 0
    return refused and figures["exit_code"] == 2


def is_finished(figures: Tree) -> bool:
    """Whether the run made its update within limits."""
    return figures["verdict"] == "within limits" and figures["exit_code"] == 0


def is_unjudged(figures: Tree) -> bool:
    """Whether the run made its update and its settings have no limits."""
    return figures["verdict"] == "off" and figures["exit_code"] == 0


def closest(records: Sequence[Tree]) -> Tree:
    """By limits: how many figures were recorded, and the largest as shares of the limits."""
    found: Tree = {}
    for each in records:
        kind = found.setdefault(each["limits"], {"figures": 0, "of_abs_dp": 0.0, "of_k3": 0.0})
        kind["figures"] += 1
        kind["of_abs_dp"] = max(kind["of_abs_dp"], each["of_abs_dp"])
        kind["of_k3"] = max(kind["of_k3"], each["of_k3"] or 0.0)
    return found
