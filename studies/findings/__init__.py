"""The papers' findings, measured again: AsyncOPD, TIS, GEPO.

    python -m studies findings [--only NAME ...] [--budget-s S] [--jobs N] [--dirty] [--clean]

Runs what is missing of the studies named (all of them by default), keeps a row of each run as it
ends in benchmarks/results/findings_rows.jsonl, and prints what the rows say. Stopped, it goes on
where it was; `--budget-s 0` runs nothing. `--clean` makes rows again whose tree differed from its
commit. docs/findings.md reads the results.

    python -m studies findings --again N [--draw SEED]

Makes N recorded runs again, drawn at random, and fails unless all of their figures are the same.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.case_rows import recorded, run_commits
from harness.tree import RESULTS, clean_commit, is_dirty, marked_commit
from studies.findings import quantised, wall_clock
from studies.findings.again import chosen as chosen_of
from studies.findings.again import made_again
from studies.findings.figures import by_chance, of_study, table
from studies.findings.pool import run_missing
from studies.findings.rows import Row
from studies.findings.studies import CONTROL, SWEEPS, in_turn, studies
from studies.findings.trial import NOISE_PCT, Study
from studies.grid.trials import KeptRows, finished_rows

JOBS = 2
FOREVER_S = 1e9


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the runs and servers that were started, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measure(
    options: Sequence[str] = (),
    *,
    rows: Path = RESULTS / "findings_rows.jsonl",
    out: Path = Path("runs/findings"),
) -> dict[str, Any]:
    """Run what is missing; what the rows say, by study."""
    known = {study.name: study for study in studies()}
    parser = argparse.ArgumentParser(prog="python -m studies findings")
    parser.add_argument("--only", nargs="*", choices=sorted(known), help="studies to run")
    parser.add_argument("--budget-s", type=float, default=FOREVER_S, help="begin none after it")
    parser.add_argument("--jobs", type=int, default=JOBS, help="runs beside each other")
    parser.add_argument("--again", type=int, metavar="N", help="make N recorded runs again")
    parser.add_argument("--draw", type=int, default=0, help="seed by which those are drawn")
    parser.add_argument("--dirty", action="store_true", help="record from a tree as it is")
    parser.add_argument("--clean", action="store_true", help="make rows of such trees again")
    asked = parser.parse_args(list(options))
    commit = marked_commit if asked.dirty else clean_commit
    chosen = [known[name] for name in asked.only or known]
    trials = in_turn(chosen)
    with ended_by_sigterm():
        if asked.again:
            kept = finished_rows(trials, KeptRows(rows))
            return made_again(chosen_of(trials, kept, asked.again, asked.draw), kept, asked.jobs)
        found = run_missing(
            trials,
            rows,
            out,
            jobs=asked.jobs,
            budget_s=asked.budget_s,
            commit=commit,
            clean=asked.clean,
        )
    said = {study.name: _said(study, found) for study in chosen}
    return {
        "run_commits": run_commits(found.values()),
        "missing": [trial.name for trial in trials if trial.name not in found],
        "dirty": sorted(name for name, row in found.items() if is_dirty(row)),
        "noise_pct": NOISE_PCT,
        "comparisons": by_chance(said),
        "studies": said,
        "quantised_of_more_updates": quantised.earlier(recorded(rows)),
    }


def _said(study: Study, found: Mapping[str, Row]) -> dict[str, Any]:
    """What the rows of one study say."""
    rows = [found[trial.name] for trial in study.trials if trial.name in found]
    said: dict[str, Any] = {"source": study.source}
    if study.name in SWEEPS:
        return said | of_study(SWEEPS[study.name].pairs, table(rows), CONTROL)
    for module in (quantised, wall_clock):
        if study.name == module.NAME:
            return said | module.said(rows)
    return said | {"runs": [{"name": row["name"], **row["summary"]} for row in rows]}
