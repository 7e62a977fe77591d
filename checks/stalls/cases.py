"""What is measured: who stalls, how, and what the run's limits on waiting are meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.data_path.cases import DRAWS, Case

SAMPLES = Case(4096, 14)
BATCH = 32
SLOTS = 32
# by default; as long as no limit; far shorter than a stall
DEFAULT_S, PATIENT_S, HASTY_S = 300.0, 3600.0, 2.0
DEFAULT_TRIES, MANY_TRIES = 3, 1_000_000
SETTLE_S, CONTROL_SETTLE_S = 20.0, 3.0
CONTROL_S = 30.0
WARM_UPDATES, UPDATES, CONTROL_UPDATES = 30, 60, 10_000
# a batch ahead, as most runs have it; so many that no stall of seconds fills them
AHEAD, CONTROL_AHEAD = 1, 1000
# seconds a reply, one after another: of the student where nothing bounds it, of the teacher
CONTROL_PACE_S, PACE_S = 0.1, 0.02
SLOWER = 100

Behaviour = Literal["serve", "silent", "stuck", "slow"]
"""Of the teacher. silent: takes connections and says nothing, whatever is asked. stuck: says how it
is, and finishes no request. slow: takes SLOWER times as long for each."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Describes a stall.

    teacher: how it behaves; "serve": it is the learner's head that takes nothing. timeout_s,
    attempts: the teacher's request_timeout_s and scoring.attempts. supervised: the run's own
    supervisor watches the teacher. bounded: permits bound what is in flight; the controls' do not.
    """

    name: str
    teacher: Behaviour
    timeout_s: float = PATIENT_S
    attempts: int = DEFAULT_TRIES
    supervised: bool = False
    bounded: bool = True

    def settings(self, teacher: str) -> dict[str, Any]:
        """Return the configuration of its run. teacher: the url of the fake one."""
        updates, ahead = (UPDATES, AHEAD) if self.bounded else (CONTROL_UPDATES, CONTROL_AHEAD)
        return {
            "run": {"max_steps": updates},
            "data": {"train": "x"},
            "student": {"model": "m"},
            "teacher": {"model": "m", "request_timeout_s": self.timeout_s, "urls": [teacher]},
            "objective": {"type": "reverse_kl"},
            "support": {"type": "mc", "m": DRAWS},
            "rollout": {"max_new_tokens": SAMPLES.tokens, "concurrency": SLOTS},
            "scoring": {"concurrency": SLOTS, "attempts": self.attempts},
            "schedule": {"type": "async", "max_staleness": ahead},
            "buffer": {"batch_size": BATCH},
            "learner": {"max_tokens_per_microbatch": 1 << 20, "dtype": "float32"},
            "security": {"insecure": True},
        }


STALLS = (
    Stall("teacher silent", "silent"),
    Stall("teacher 100 times slower", "slow", DEFAULT_S),
    Stall("learner takes nothing", "serve"),
    Stall("teacher silent, default limits", "silent", DEFAULT_S),
    Stall("teacher silent, default limits, supervised", "silent", DEFAULT_S, supervised=True),
    Stall("teacher makes no progress, default limits", "stuck", DEFAULT_S),
    Stall("teacher silent, tried every few seconds", "silent", HASTY_S, MANY_TRIES),
    Stall("control: teacher silent, no bound", "silent", bounded=False),
    Stall("control: learner takes nothing, no bound", "serve", bounded=False),
)
BY_NAME = {stall.name: stall for stall in STALLS}
