"""What the studies have in common: the configuration, and what a study is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from studies.findings.estimators import Overrides
from studies.grid.statistics import noise_pct
from studies.grid.trials import Trial

CONFIG = Path("examples/wordy/wordy.yaml")
LR = "learner.optimizer.lr"
# at which both 1 and 64 draws learn, and lose 14 and 9 points by a staleness of 64 (the pilot)
CHOSEN_LR = "5.0e-5"
# an accuracy is of 256 problems with two answers each (the file's `evaluation`)
NOISE_PCT = noise_pct(512)
"""What one accuracy is uncertain by; no interval of accuracies is narrower."""
SIZE: Overrides = {
    "run.max_steps": "96",
    "evaluation.before": "false",
    "checkpoint.export_hf": "false",
    "metrics": "{tensorboard: false, trace: false, progress: false}",
}


@dataclass(frozen=True)
class Study:
    """Some runs and the question that they answer. source: the figure or table it repeats."""

    name: str
    source: str
    trials: tuple[Trial, ...]
