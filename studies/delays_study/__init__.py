"""Rollouts whose delay is drawn: GRPO, GSPO, GEPO, each with CPPO-KL and without (GEPO sec. 4.1).

    python -m studies delays_study [--limit N] [--budget-s S] [--clean]

As in the paper the methods differ in the importance weight alone (Listing 1): one advantage (reward
minus the group's mean, Eq. 5), one reduction (mean over responses), one clip (PPO's minimum at 0.8
and 1.2), no defensive term. Each update's batch is as old as a delay that is drawn for it
(schedule.delays): the paper's 60 to 1800 seconds stand for 2 to 64 updates, by a log-normal, a
Weibull or an exponential distribution of which 99.5% lie between them; constant: 64 updates always
(the first 64 batches all come from version 0); online: none. The staleness of a batch is exact, so
that timing decides nothing. The student is evaluated every 16 updates: best and last accuracy, as
in Table 2.

90 runs, one factor at a time, most telling first: for every seed the paper's recipe (CPPO-KL with
delays, none online), constant and log-normal delays before the others; then the delays of that seed
without it; at last a constant 64 with CPPO-KL as GEPO's code has it, k3 without the ratio. Online
the penalty's gradient is 0, so that one run stands for both. Rows are kept in
benchmarks/results/delays_study_rows.jsonl; stopped, the study goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.delays_study import figures
from studies.delays_study.grid import (
    COMMON,
    CONFIG,
    HIGH_S,
    LARGEST_DELAY,
    LOW_S,
    PENALTIES,
    SEEDS,
    SIZE,
    trials,
)
from studies.grid.statistics import comparisons
from studies.grid.study import run_rows, said
from studies.grid.trials import Launch, launch

__all__ = ["measure", "trials"]


def measure(options: Sequence[str] = (), launch: Launch = launch, **paths: Path) -> dict[str, Any]:
    """Run what is missing; everything by (delay and penalty, method)."""
    rows = run_rows("delays_study", trials(), options, launch=launch, **paths)
    by_key = figures.keyed(rows)
    compared = {
        "differences": figures.differences(by_key),
        "losses": figures.losses(by_key),
        "falls": figures.falls(by_key),
        "penalties": figures.penalties(by_key),
        "stability": figures.stability(by_key),
    }
    return {
        "config": str(CONFIG),
        "size": SIZE,
        "common": COMMON,
        "penalties_of": PENALTIES,
        "delays": {"low_s": LOW_S, "high_s": HIGH_S, "largest_updates": LARGEST_DELAY},
        "seeds": len(SEEDS),
        "answers": figures.ANSWERS,
        "noise_pct": figures.NOISE_PCT,
        **said(trials(), rows, figures.NOISE_PCT),
        "correlations": figures.correlations(by_key),
        **compared,
        "within_claimed_loss": figures.losses(by_key, figures.CLAIMED_LOSS_PCT),
        "comparisons": {
            name: comparisons(part) for name, part in (*compared.items(), ("all", compared))
        },
    }
