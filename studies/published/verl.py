"""Predicts every row of verl's tables without its run, beside plain guesses and two controls.

Two horizons: `whole_runs`, the means that verl publishes, and `first_hundred`, the first 100 steps,
in which the lengths of two runs had the least time to drift apart. A control takes something away
that the tables depend on; if it predicts no worse, the study says nothing and fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from studies.published.verl_fit import Fold, leave_one_out
from studies.published.verl_model import (
    Parameters,
    Sampling,
    mean_length_of,
    plain,
    predict,
    step_seconds,
)
from studies.published.verl_rows import (
    NOT_PREDICTED,
    Case,
    first_hundred,
    speedup,
    whole_runs,
)

HORIZONS: dict[str, Callable[[], tuple[Case, ...]]] = {
    "first_hundred": first_hundred,
    "whole_runs": whole_runs,
}
AIM, AT_WORST = 0.10, 0.15
Tree = dict[str, Any]


def study() -> Tree:
    """Return both horizons, what is not predicted and why, and the controls that did not fail."""
    horizons = {name: _horizon(name, cases()) for name, cases in HORIZONS.items()}
    failed = [
        f"verl, {name}: the control {control!r} predicts no worse"
        for name, horizon in horizons.items()
        for control in vain_controls(horizon["mean_error"])
    ]
    return {"not_predicted": NOT_PREDICTED, **horizons, "failed": failed}


def vain_controls(mean_error: Tree) -> list[str]:
    """Return the controls whose mean error is no larger than that of the simulator."""
    return [name for name in CONTROLS if mean_error[name] <= mean_error["simulator"]]


def _horizon(name: str, cases: Sequence[Case]) -> Tree:
    folds = leave_one_out(cases)
    steps = {fold.case.row.name: _steps(fold, cases) for fold in folds}
    methods = next(iter(steps.values()))
    errors = {
        method: [steps[case.row.name][method] / case.row.step_s - 1 for case in cases]
        for method in methods
    }
    sure = [error for error, c in zip(errors["simulator"], cases, strict=True) if not c.row.doubt]
    hundreds = [1 if name == "first_hundred" else len(case.row.total_min) for case in cases]
    return {
        "rows": [
            _row(fold, steps[fold.case.row.name], count)
            for fold, count in zip(folds, hundreds, strict=True)
        ],
        "mean_error": {method: round(mean_log(found), 3) for method, found in errors.items()},
        "all": tally(errors["simulator"]),
        "without_doubt": tally(sure),
    }


def _row(fold: Fold, steps: Tree, hundreds: int) -> Tree:
    row, colocated = fold.case.row, fold.case.colocated
    step_s = steps["simulator"]
    return {
        "row": row.name,
        "doubt": row.doubt,
        "step_s": {"published": round(row.step_s, 1), "predicted": round(step_s, 1)},
        "error": round(step_s / row.step_s - 1, 3),
        "speedup": {
            "published": round(speedup(row, hundreds), 2),
            "predicted": round(colocated.step_s / step_s, 2),
        },
        "update_s": {
            "published": round(row.update_s, 1),
            "predicted": round(fold.parameters.update_s(fold.case), 1),
        },
        "other_errors": {
            method: round(found / row.step_s - 1, 3)
            for method, found in steps.items()
            if method != "simulator"
        },
        "fitted_on_the_others": asdict(fold.parameters),
        "mean_response_tokens": round(mean_length_of(colocated, fold.parameters)),
    }


def _steps(fold: Fold, cases: Sequence[Case]) -> dict[str, float]:
    """Return the seconds of a step by every method; circular ones say so."""
    case, parameters = fold.case, fold.parameters
    others = [other for other in cases if other.row.run != case.row.run]
    return {
        "simulator": predict(case, parameters),
        **{name: guess(case, others) for name, guess in GUESSES.items()},
        **{name: predict(change(case), parameters) for name, change in CONTROLS.items()},
        "circular: with the row's own update_actor": _with_own_update(case, parameters),
    }


def _with_own_update(case: Case, parameters: Parameters) -> float:
    """Return the step if the row's update time were known: what is left is the schedule's."""
    colocated = case.colocated
    sampling = Sampling(parameters.step_s, parameters.cv, parameters.sync_s)
    return step_seconds(
        plain(case.row), colocated.cards, colocated.gen_s, sampling, 0.0, case.row.update_s
    )


def update_on_half(case: Case, others: Sequence[Case]) -> float:
    """Guess that only updates count, and take twice as long on half of the cards."""
    return 2 * case.colocated.update_s


def perfect_overlap(case: Case, others: Sequence[Case]) -> float:
    """Guess that both stages take twice as long, and the shorter is hidden behind the longer."""
    return 2 * max(case.colocated.gen_s, case.colocated.update_s)


def speedup_of_the_others(case: Case, others: Sequence[Case]) -> float:
    """Guess the geometric mean of the other runs' speed-ups."""
    logs = [math.log(other.colocated.step_s / other.row.step_s) for other in others]
    return case.colocated.step_s / math.exp(fmean(logs))


GUESSES = {
    "guess: colocated update x cards ratio": update_on_half,
    "guess: perfect overlap": perfect_overlap,
    "guess: mean speed-up of the other runs": speedup_of_the_others,
}


def without_staleness(case: Case) -> Case:
    """Take away that sampling runs ahead."""
    return replace(case, row=replace(case.row, staleness=0.0))


def with_gen_doubled(case: Case) -> Case:
    """Make sampling take twice as long."""
    return replace(case, colocated=replace(case.colocated, gen_s=2 * case.colocated.gen_s))


CONTROLS = {
    "control: staleness ignored": without_staleness,
    "control: gen doubled": with_gen_doubled,
}


def mean_log(errors: Sequence[float]) -> float:
    """Return the mean of |log(1 + error)|, in which half and double are equally wrong."""
    return fmean(abs(math.log1p(error)) for error in errors)


def tally(errors: Sequence[float]) -> Tree:
    """Return how many errors are within what was aimed at, and the largest."""
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(sizes),
        "within_10_percent": sum(size <= AIM for size in sizes),
        "within_15_percent": sum(size <= AT_WORST for size in sizes),
        "largest": round(max(sizes), 3),
    }
