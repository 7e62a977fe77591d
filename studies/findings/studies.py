"""The studies: which runs each has, one factor at a time, paired seeds, and its control.

Every run is examples/wordy/wordy.yaml with SIZE and an estimator (estimators.py). The prompts and
their order follow from the seed alone, so runs of one seed differ in nothing but what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from studies.findings import quantised, wall_clock
from studies.findings.estimators import ESTIMATORS
from studies.findings.trial import CHOSEN_LR, CONFIG, LR, SIZE, Study
from studies.grid.trials import Trial

PILOT_LRS = ("2.0e-5", "5.0e-5", "1.0e-4", "2.0e-4")
SEEDS = (1, 2, 3)
STALENESS = (0, 64, 8)
"""In the order in which they are run. Every seed has all of them: only then do slopes compare."""


@dataclass(frozen=True)
class Sweep:
    """Estimators by staleness. pairs: (one, other) whose accuracies are subtracted by seed."""

    source: str
    pairs: tuple[tuple[str, str], ...]

    @property
    def estimators(self) -> tuple[str, ...]:
        """Which estimators are run, each once, in the order in which the pairs name them."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in pair))


SWEEPS: dict[str, Sweep] = {
    "direction": Sweep("AsyncOPD Fig. 2", (("forward_top16", "old_clip"), ("mc64", "old_clip"))),
    "surrogates": Sweep(
        "AsyncOPD Figs. 3, 5, Table 1a",
        (("theta", "old"), ("theta", "old_clip"), ("theta_clip", "theta"), ("old_clip", "old")),
    ),
    "async_rl": Sweep(
        "AsyncOPD Fig. 4, Table 1a",
        (
            ("theta", "decoupled"),
            ("theta", "decoupled_cap5"),
            ("theta", "m2po"),
            ("theta", "m2po_code"),
            ("theta", "m2po_clip"),
        ),
    ),
    "sets": Sweep(
        "AsyncOPD Fig. 6", (("theta", "top16"), ("theta", "top16_rw"), ("top16_rw", "top16"))
    ),
    "draws": Sweep(
        "AsyncOPD Fig. 7, Table 1b",
        (("mc4", "theta"), ("mc16", "theta"), ("mc64", "theta"), ("mc64", "mc4")),
    ),
    "ratio": Sweep("AsyncOPD Fig. 10", (("theta", "theta_no_is"), ("mc16", "mc16_no_is"))),
    "ours": Sweep(
        "beyond AsyncOPD",
        (
            ("atoms2_thin4", "mc64"),
            ("atoms4_thin64", "top7_rw"),
            ("atoms4_thin64", "mc64"),
            ("exact", "atoms4_thin64"),
            ("mc64_tis2", "mc64"),
        ),
    ),
}
"""By name, what is repeated and compared."""
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
    sweep = SWEEPS[name]
    runs = [at(name, k, seed) for name in sweep.estimators for k in STALENESS for seed in SEEDS]
    controls = [at(CONTROL, k, seed) for k in STALENESS[:2] for seed in SEEDS]
    return Study(name, sweep.source, tuple(sorted([*runs, *controls], key=_turn)))


def _turn(trial: Trial) -> tuple[int, int, str]:
    """Which trials come first: one seed whole, then the next."""
    return trial.seed, STALENESS.index(int(trial.setting[1:])), trial.name


@cache  # a trial computes its fingerprint once
def studies() -> Sequence[Study]:
    """All of them."""
    swept = [staleness_study(name) for name in SWEEPS]
    return (pilot(), *swept, quantised.study(), wall_clock.study())


def in_turn(chosen: Sequence[Study]) -> list[Trial]:
    """Their trials in the order in which they are run; one that studies share is run once."""
    every = {trial.name: trial for study in chosen for trial in study.trials}
    swept = {trial.name for study in chosen if study.name in SWEEPS for trial in study.trials}
    others = [trial for name, trial in every.items() if name not in swept]
    return others + sorted((every[name] for name in swept), key=_turn)
