"""TIS: GRPO from a verifier while the servers sample from rounded weights, by correction.

The sampler's gap is that of weights on the grid of int8 or fp8 (`weight_sync.round_to`); the exact
sampler is the control, on which no correction may do anything. Activations are not rounded: on a
CPU no server computes with numbers of one byte. UPDATES is how long a run that does not collapse is
given.
"""

from __future__ import annotations

from typing import Any

from benchmarks.findings.estimators import Overrides
from benchmarks.findings.figures import accuracy, highest, level
from benchmarks.findings.rows import Row
from benchmarks.findings.trial import CONFIG, SIZE, Study
from benchmarks.grid.statistics import interval
from benchmarks.grid.trials import Trial

NAME, SOURCE = "quantised", "TIS Figs. 1-6"
UPDATES = 240
SEEDS = (1, 2, 3)
SAMPLERS = {"fp8": "fp8", "exact": "null", "int8": "int8"}
CORRECTIONS = {
    "none": "{type: none, prox: true}",
    "tis_2": "{type: truncated, max_ratio: 2.0, prox: true}",
    "vanilla_is": "{type: importance, prox: true}",
    "ppo_is": "{type: importance}",
    "masked": "{type: masked, prox: true}",
    "tis_1": "{type: truncated, max_ratio: 1.0, prox: true}",
    "tis_8": "{type: truncated, max_ratio: 8.0, prox: true}",
}
RECIPE: Overrides = {
    "run.max_steps": str(UPDATES),
    "schedule.type": "sync",
    "objective": "{type: grpo}",
    "rollout.group_size": "8",
    "buffer.batch_size": "64",
    "learner.num_mini_batches": "2",
    "learner.optimizer.lr": "1.0e-4",
    "evaluation.every": "48",
    "evaluation.blocks": "true",
}
COLLAPSED_PCT = 5.0  # accuracy below which nothing is left of the student
MIN_MAX = ("entropy_nats", "response_tokens_mean", "sampler_start_k1_nats", "sampler_start_k3_nats")


def study() -> Study:
    """Its runs: one seed of all corrections on fp8 and the exact sampler first, int8 last."""
    runs = [
        Trial(f"sampler_{sampler}", name, seed, CONFIG, SIZE | RECIPE | _changed(sampler, name))
        for samplers in (("fp8", "exact"), ("int8",))
        for seed in SEEDS
        for sampler in samplers
        for name in CORRECTIONS
    ]
    return Study(NAME, SOURCE, tuple(runs))


def _changed(sampler: str, correction: str) -> Overrides:
    return {
        "weight_sync.round_to": SAMPLERS[sampler],
        "correction": CORRECTIONS[correction],
    }


def said(rows: list[Row]) -> dict[str, Any]:
    """By sampler and correction: accuracy, the gap, its correction, entropy, length, k1's sign."""
    found: dict[str, Any] = {}
    for sampler in SAMPLERS:
        for name in CORRECTIONS:
            mine = [
                row
                for row in rows
                if row["setting"] == f"sampler_{sampler}" and row["method"] == name
            ]
            if mine:
                found.setdefault(sampler, {})[name] = _figures(mine)
    return {"updates": UPDATES, "by_sampler": found}


def _figures(rows: list[Row]) -> dict[str, Any]:
    return {
        "seeds": [row["seed"] for row in rows],
        "diverged": sum(row["status"] == "diverged" for row in rows),
        "collapsed": sum(accuracy(row) < COLLAPSED_PCT for row in rows),
        "accuracy_after_pct": interval([accuracy(row) for row in rows]),
        "k1_negative_share": interval([_negative_share(row) for row in rows]),
        "importance_variance_largest": [highest(row, "importance_variance") for row in rows],
        "truncated_fraction_mean": interval([level(row, "truncated_fraction") for row in rows]),
        "of_the_last_updates": {
            curve: interval([level(row, curve) for row in rows]) for curve in MIN_MAX
        },
    }


def _negative_share(row: Row) -> float | None:
    """Share of updates at which the k1 estimate of KL(sampler || learner) is below 0."""
    known = [value for value in row["curves"]["sampler_start_k1_nats"] if value is not None]
    return sum(value < 0 for value in known) / len(known) if known else None
