"""The studies: which runs each has, one factor at a time, paired seeds, and its control.

Every run is examples/wordy/wordy.yaml with SIZE and an estimator (estimators.py). The prompts and
their order follow from the seed alone, so runs of one seed differ in nothing but what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.findings import quantised, wall_clock
from benchmarks.findings.estimators import ESTIMATORS
from benchmarks.findings.trial import CHOSEN_LR, CONFIG, LR, SIZE, Study
from benchmarks.grid.trials import Trial

PILOT_LRS = ("2.0e-5", "5.0e-5", "1.0e-4", "2.0e-4")
SEEDS = (1, 2, 3)
# in the order in which they are run: the ends and the middle first
STALENESS = (0, 64, 8, 32, 2, 16, 4, 1)
FIRST = 3  # of those, run for every seed before the others are for any

STUDIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "direction": ("AsyncOPD Fig. 2", ("forward_top16", "old_clip", "theta", "mc64")),
    "surrogates": ("AsyncOPD Figs. 3, 5, Table 1a", ("theta", "theta_clip", "old", "old_clip")),
    "async_rl": ("AsyncOPD Fig. 4, Table 1a", ("theta", "decoupled", "m2po")),
    "sets": ("AsyncOPD Fig. 6", ("theta", "theta_no_is", "top16", "top16_rw")),
    "draws": ("AsyncOPD Fig. 7, Table 1b", ("theta", "mc4", "mc16", "mc64")),
    "ratio": ("AsyncOPD Fig. 10", ("theta", "theta_no_is", "mc16", "mc16_no_is")),
    "ours": ("beyond AsyncOPD", ("mc64", "mc64_tis2", "atoms4_thin64", "exact")),
}
"""By name: what is repeated, and the estimators that are compared."""
CONTROL = "flipped"


def at(estimator: str, staleness: int, seed: int, lr: str | None = None) -> Trial:
    """An estimator at one staleness. lr: another learning rate, which names the setting."""
    held = {"schedule.max_staleness": str(staleness), LR: lr or CHOSEN_LR}
    setting = f"k{staleness}" if lr is None else f"k{staleness}_{lr.replace('.', 'p')}"
    return Trial(setting, estimator, seed, CONFIG, SIZE | held | ESTIMATORS[estimator])


def pilot() -> Study:
    """Learning rates at the two ends: where staleness hurts and the student still learns."""
    trials = tuple(
        at(estimator, k, 1, lr)
        for lr in PILOT_LRS
        for k in (64, 0)
        for estimator in ("theta", "mc64")
    )
    return Study("pilot", "AsyncOPD App. B: the task", trials)


def staleness_study(name: str) -> Study:
    """Estimators by staleness; the control at its two ends."""
    source, estimators = STUDIES[name]
    runs = [at(estimator, k, seed) for estimator in estimators for k in STALENESS for seed in SEEDS]
    controls = [at(CONTROL, k, seed) for k in STALENESS[:2] for seed in SEEDS]
    return Study(name, source, tuple(sorted([*runs, *controls], key=_turn)))


def _turn(trial: Trial) -> tuple[bool, int, int, str]:
    """Which trials come first: the first three stalenesses for every seed, then the others."""
    place = STALENESS.index(int(trial.setting[1:]))
    later = place >= FIRST
    return later, (place if later else trial.seed), (trial.seed if later else place), trial.name


def studies() -> Sequence[Study]:
    """All of them."""
    swept = [staleness_study(name) for name in STUDIES]
    return [pilot(), *swept, quantised.study(), wall_clock.study()]


def in_turn(chosen: Sequence[Study]) -> list[Trial]:
    """Their trials in the order in which they are run; one that studies share is run once."""
    every = {trial.name: trial for study in chosen for trial in study.trials}
    swept = {trial.name for study in chosen if study.name in STUDIES for trial in study.trials}
    others = [trial for name, trial in every.items() if name not in swept]
    return others + sorted((every[name] for name in swept), key=_turn)
