"""Fits the parameters of verl_model.py on all runs but one, and predicts that one.

The times of the run that is predicted never enter: not its own row, nor another row of the same
run. call_s and share are a least-squares fit of update_actor, sync_s is read off, and step_s and
cv are the best of a few values, by the steps of the other runs. For that choice a
table stands in for the simulator: what it says of each colocated run and mode at a few durations of
the updates, which holds no time of an asynchronous run and so serves every fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from studies.published.verl_model import Parameters, Sampling, plain, step_seconds
from studies.published.verl_rows import Case

STEP_S = (0.0024, 0.0038, 0.0052)
"""Candidates: from what an H20 needs by its data sheet, to what the colocated runs allow: at 64
cards, 151 s for responses of up to 28,672 steps."""
CV = (0.8, 1.6)
BUSY_SHARES = (0.6, 1.6)
"""Durations of a step's updates in the table, over update_actor of the colocated run."""

Waits = Callable[[Case, float, float, float], float]
"""Returns the seconds of a step in which the trainer waits: of a case, step_s, cv and busy_s."""


def waits_by_table(case: Case, step_s: float, cv: float, busy_s: float) -> float:
    """Interpolate the simulated wait. busy_s: of the trainer in a step, weight sync included."""
    colocated = case.colocated
    grid = [share * colocated.update_s for share in BUSY_SHARES]
    found = [
        step_seconds(
            plain(case.row),
            colocated.cards,
            colocated.gen_s,
            Sampling(step_s, cv, 0.0),
            0.0,
            seconds,
        )
        - seconds
        for seconds in grid
    ]
    return float(np.interp(busy_s, grid, found))


def fit(cases: Sequence[Case], waits: Waits = waits_by_table) -> Parameters:
    """Fit the parameters on cases. ValueError: there is none."""
    if not cases:
        raise ValueError("the parameters must be fitted on at least one case, got none")
    call_s, share = fit_updates(cases)
    # the stages of one row exceed its step
    rests = [case.row.rest_s for case in cases if case.row.rest_s > 0]
    sync_s = float(np.mean(rests)) if rests else 0.0
    candidates = [
        Parameters(call_s, share, sync_s, step_s, cv) for step_s, cv in product(STEP_S, CV)
    ]
    return min(candidates, key=lambda candidate: misfit(cases, candidate, waits))


def fit_updates(cases: Sequence[Case]) -> tuple[float, float]:
    """Fit call_s >= 0 and share to update_actor, by relative least squares.

    calls call_s + share (colocated - call_s) is linear in call_s, share and their product; with
    call_s given, share is one division. So call_s is the best of a fine grid.
    """

    def share_at(call_s: float) -> tuple[float, float]:
        """Return the squared error and the share."""
        scaled = [(c.colocated.update_s - call_s) / c.row.update_s for c in cases]
        wanted = [1 - c.row.calls * call_s / c.row.update_s for c in cases]
        share = max(0.0, float(np.dot(scaled, wanted) / np.dot(scaled, scaled)))
        return float(np.sum((share * np.array(scaled) - wanted) ** 2)), share

    call_s = min(np.arange(0.0, 15.01, 0.25), key=lambda seconds: share_at(seconds)[0])
    return float(call_s), share_at(call_s)[1]


def misfit(cases: Sequence[Case], parameters: Parameters, waits: Waits) -> float:
    """Return the sum of squared logarithms of predicted over published steps."""
    total = 0.0
    for case in cases:
        busy_s = parameters.update_s(case) + parameters.sync_s
        step_s = busy_s + waits(case, parameters.step_s, parameters.cv, busy_s)
        total += math.log(step_s / case.row.step_s) ** 2
    return total


@dataclass(frozen=True, slots=True)
class Fold:
    """Holds the parameters that predict one case, fitted without its run."""

    case: Case
    parameters: Parameters


def leave_one_out(cases: Sequence[Case], waits: Waits = waits_by_table) -> list[Fold]:
    """Fit for every case on the cases of all other runs."""
    return [
        Fold(case, fit([other for other in cases if other.row.run != case.row.run], waits))
        for case in cases
    ]
