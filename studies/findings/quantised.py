"""TIS: GRPO from a verifier while the servers sample from rounded weights, by correction.

The sampler's gap is that of weights on a grid (`weight_sync.round_to`). On int8 and fp8, which
engines serve, a model this small hardly moves: int3 has the gap that the paper saw with int8,
probabilities that differ by up to 1. So every correction runs on int3, and some on the other grids
and on the exact sampler, where a correction may do nothing. Activations are not rounded: on a CPU
no server computes with numbers of one byte. SEEDS says how many runs each has; it was fixed before
the first of them. UPDATES is how long a run that does not collapse is given.

ppo_is is what `objective: {type: grpo}` took where a file said nothing of `correction`, tis_2 is
what it takes now.

Two accuracies: of what the servers hold, which is rounded, and of the learner's own weights, by
`opd eval` of the checkpoint that the run exports.

The control must fail: GRPO with the sign of its advantage turned round, on the exact sampler.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from studies.findings.estimators import Overrides
from studies.findings.exported import KEY
from studies.findings.figures import BySeed, accuracy, by_seed, controlled, highest, keyed, level
from studies.findings.rows import Row
from studies.findings.trial import CONFIG, NOISE_PCT, SIZE, Study
from studies.grid.statistics import interval
from studies.grid.trials import Trial

NAME, SOURCE = "quantised", "TIS Figs. 1-6"
UPDATES = 144
SAMPLERS = {"exact": "null", "int3": "int3", "int4": "int4", "fp8": "fp8", "int8": "int8"}
CONTROL = "flipped"
SEEDS: dict[str, dict[str, int]] = {
    "exact": {"none": 8, "tis_2": 8, "ppo_is": 5, CONTROL: 3},
    "int3": {
        "none": 8,
        "tis_2": 8,
        "ppo_is": 5,
        "vanilla_is": 3,
        "masked": 3,
        "tis_1": 3,
        "tis_8": 3,
    },
    "fp8": {"none": 3, "tis_2": 3, "ppo_is": 3},
    "int4": {"none": 1, "tis_2": 1},
    "int8": {"none": 1, "tis_2": 1},
}
"""By sampler and correction, how many seeds are run: 1, 2, ..."""
FLIPPED = '{type: "studies.findings.flipped:FlippedGrpo"}'
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
    "learner.score_start": "true",
    "learner.optimizer.lr": "1.0e-4",
    "evaluation.every": "48",
    "checkpoint.export_hf": "true",
    "evaluation.blocks": "true",
}
COLLAPSED_PCT = 5.0  # accuracy below which nothing is left of the student
OF_THE_END = (
    "entropy_nats",
    "response_tokens_mean",
    "sampler_start_k1_nats",
    "sampler_start_k3_nats",
)
SYMPTOMS = ("entropy_nats", "response_tokens_mean")
K1 = "prox_k1_nats"
"""log p0 - log p on the sampler's tokens, the k1 of TIS Fig. 5. log o - log p0, whose mean
estimates KL(o || p0), is never below 0 in expectation."""
DRAWN = ("reward_mean", K1, *OF_THE_END)
EARLIER_UPDATES = 240
BLOCK = 12  # updates that a point of a drawn curve averages


def study() -> Study:
    """Its runs, seed by seed."""
    runs = [
        (seed, _trial(sampler, name, seed))
        for sampler, seeds in SEEDS.items()
        for name, count in seeds.items()
        for seed in range(1, count + 1)
    ]
    return Study(NAME, SOURCE, tuple(trial for _, trial in sorted(runs, key=lambda run: run[0])))


def _trial(sampler: str, name: str, seed: int) -> Trial:
    changed = {"weight_sync.round_to": SAMPLERS[sampler]}
    if name == CONTROL:
        changed |= {"objective": FLIPPED, "correction": CORRECTIONS["none"]}
    else:
        changed |= {"correction": CORRECTIONS[name]}
    return Trial(f"sampler_{sampler}", name, seed, CONFIG, SIZE | RECIPE | changed)


def said(rows: list[Row]) -> dict[str, Any]:
    """By sampler and correction: accuracy, the gap, its correction, entropy, length, k1's sign."""
    runs, found = keyed(rows), dict[str, Any]()

    def of(sampler: str, name: str) -> BySeed:
        return runs.get((f"sampler_{sampler}", name), {})

    exact = of("exact", "none")
    for sampler in SAMPLERS:
        for name in SEEDS[sampler]:
            mine = of(sampler, name)
            if mine:
                less = {
                    "less_exact_pct": _less(mine, exact),
                    "less_none_pct": _less(mine, of(sampler, "none")),
                    "less_tis_2_pct": _less(mine, of(sampler, "tis_2")),
                    "less_exact": {c: interval(by_seed(mine, exact, c)) for c in SYMPTOMS},
                }
                found.setdefault(sampler, {})[name] = _figures(list(mine.values())) | less
    return {
        "updates": UPDATES,
        "collapsed_pct": COLLAPSED_PCT,
        "block": BLOCK,
        "by_sampler": found,
        "control": controlled(CONTROL, of("exact", CONTROL), exact),
    }


def _less(runs: BySeed, others: BySeed) -> dict[str, Any]:
    """Accuracy of the learner's own weights less that of other runs, each seed with itself."""
    both = [
        (row["summary"].get(KEY), others[seed]["summary"].get(KEY))
        for seed, row in runs.items()
        if seed in others
    ]
    return interval([a - b for a, b in both if a is not None and b is not None], NOISE_PCT)


def _figures(rows: list[Row]) -> dict[str, Any]:
    return {
        "seeds": [row["seed"] for row in rows],
        "diverged": sum(row["status"] == "diverged" for row in rows),
        "collapsed": sum(accuracy(row) < COLLAPSED_PCT for row in rows),
        "accuracy_after_pct": interval([accuracy(row) for row in rows], NOISE_PCT),
        KEY: interval([row["summary"].get(KEY) for row in rows], NOISE_PCT),
        "k1_negative_share": interval([_negative_share(row) for row in rows]),
        "k1_nats": interval([_mean(row, K1) for row in rows]),
        "importance_variance_largest": [highest(row, "importance_variance") for row in rows],
        "truncated_fraction_mean": interval([level(row, "truncated_fraction") for row in rows]),
        "of_the_last_updates": {
            curve: interval([level(row, curve) for row in rows]) for curve in OF_THE_END
        },
        "by_block": {curve: by_block(rows, curve) for curve in DRAWN},
    }


def by_block(rows: list[Row], curve: str) -> list[float | None]:
    """A curve's means over BLOCK updates and all seeds; null where no row has a value."""
    found: list[float | None] = []
    for start in range(0, max(row["updates"] for row in rows), BLOCK):
        each = [v for row in rows for v in row["curves"].get(curve, ())[start : start + BLOCK]]
        known = [value for value in each if value is not None]
        found.append(statistics.fmean(known) if known else None)
    return found


def _negative_share(row: Row) -> float | None:
    """Share of updates at which the paper's k1 is below 0; null where it was not recorded."""
    known = _known(row, K1)
    return sum(value < 0 for value in known) / len(known) if known else None


def _mean(row: Row, curve: str) -> float | None:
    known = _known(row, curve)
    return statistics.fmean(known) if known else None


def _known(row: Row, curve: str) -> list[float]:
    return [value for value in row["curves"].get(curve, ()) if value is not None]


def earlier(rows: Iterable[Row]) -> dict[str, Any]:
    """The runs of EARLIER_UPDATES: by sampler and correction, (seed, accuracy of the servers).

    The study was begun with so many, and judged by what the servers answer.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        sampler = row["setting"].removeprefix("sampler_")
        if sampler in SAMPLERS and row["updates"] == EARLIER_UPDATES:
            runs = found.setdefault(sampler, {}).setdefault(row["method"], [])
            runs.append({"seed": row["seed"], "accuracy_after_pct": accuracy(row)})
    return {"updates": EARLIER_UPDATES, "by_sampler": found}
