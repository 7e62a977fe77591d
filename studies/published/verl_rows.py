"""Holds what verl published of its fully asynchronous trainer (its documentation, 18 October 2025).

Qwen2.5-Math-7B, H20, DAPO, responses of at most 28K tokens, 512 prompts of 16 responses a step. All
stages are mean seconds of a step; totals are the wall-clock time of the first 100, 200, 300 and 400
steps, which includes validation.

What was declared before the fits:

* not predicted (NOT_PREDICTED): the row of stale samples without partial rollout, which is blank,
  and the table of the 32B model, which is empty;
* predicted and counted, but doubtful (`doubt`): 16:16, whose colocated run became 2.2 times slower
  while it did not; staleness 0.3 and require_batches 1 and 2, whose lengths drifted by the source's
  own words; require_batches 4, which is the run of 64:64 once more, over 300 steps and not 400.
  Two means of one run cannot both be predicted from one colocated run.

`run` names the training run behind a row. All rows of a run are left out together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PROMPTS, GROUP, MINI_PROMPTS = 512, 16, 32
"""Prompts of a step, responses of each, and prompts of a mini-batch (ppo_mini_batch_size)."""
MAX_RESPONSE = 28 * 1024


@dataclass(frozen=True, slots=True)
class Colocated:
    """Describes a colocated run. cards: GPUs, all of them for every stage in turn. *_s: seconds.

    total_min: minutes of the first 100, 200, 300 and 400 steps.
    """

    cards: int
    step_s: float
    gen_s: float
    old_log_prob_s: float
    update_s: float
    total_min: tuple[int, int, int, int]

    @property
    def rest_s(self) -> float:
        """Returns the seconds of a step that are in none of its three stages."""
        return self.step_s - self.gen_s - self.old_log_prob_s - self.update_s


@dataclass(frozen=True, slots=True)
class Row:
    """Describes an asynchronous run on as many cards, half for sampling and half for training.

    gen_s: for how long the trainer waited for samples. doubt: why the row may be unpredictable.
    """

    name: str
    run: str
    cards: int
    staleness: float
    require_batches: int
    step_s: float
    gen_s: float
    update_s: float
    total_min: tuple[int, ...]
    doubt: str = ""

    @property
    def calls(self) -> int:
        """Returns the updates of a step (trigger_parameter_sync_step)."""
        return PROMPTS // (MINI_PROMPTS * self.require_batches)

    @property
    def rest_s(self) -> float:
        """Returns the seconds of a step in which the trainer neither waited nor trained."""
        return self.step_s - self.gen_s - self.update_s


def _minutes(*totals: str) -> tuple[int, ...]:
    """Read totals such as "1d 3h 43m"."""
    units = {"d": 24 * 60, "h": 60, "m": 1}
    return tuple(
        sum(int(part[:-1]) * units[part[-1]] for part in total.split()) for total in totals
    )


def _colocated(cards: int, *stages: float, totals: tuple[str, str, str, str]) -> Colocated:
    a, b, c, d = _minutes(*totals)
    return Colocated(cards, *stages, total_min=(a, b, c, d))


COLOCATED = {
    row.cards: row
    for row in (
        _colocated(32, 790.10, 357.41, 107.71, 313.81,
                   totals=("13h 44m", "1d 3h 43m", "2d 9h 22m", "3d 17h 5m")),
        _colocated(64, 365.28, 150.72, 70.26, 133.41,
                   totals=("10h 22m", "20h 45m", "1d 7h 6m", "1d 17h 32m")),
        _colocated(128, 356.30, 177.85, 53.92, 113.81,
                   totals=("8h 36m", "17h 56m", "1d 5h 6m", "1d 16h 48m")),
    )
}  # fmt: skip

LENGTHS_DRIFT = (
    "the source: staleness 0.3 and 0.5 are close because lengths change significantly with time"
)
COLOCATED_DRIFTS = (
    "the colocated run's third hundred steps took 2.2 times as long as its first, the row's 1.1"
)
BATCHES_CHANGE_LENGTHS = (
    "the source: how many samples are issued at once changes the lengths of the responses"
)
SAME_RUN = "the run of 64:64 over 300 of its 400 steps, which were 17 % shorter"
STAGES_EXCEED_STEP = "; its gen and update_actor together exceed its step by 8.5 s"

ROWS = (
    Row("16:16 partial 0.5", "16:16", 32, 0.5, 4, 294.77, 21.26, 269.80,
        _minutes("7h 58m", "16h 21m", "1d 0h 53m", "1d 9h 26m"), COLOCATED_DRIFTS),
    Row("32:32 partial 0.5", "32:32", 64, 0.5, 4, 189.26, 28.46, 156.98,
        _minutes("4h 57m", "10h 14m", "16h 58m", "21h 40m")),
    Row("64:64 partial 0.5", "64:64", 128, 0.5, 4, 150.63, 33.14, 113.16,
        _minutes("3h 13m", "6h 46m", "10h 53m", "17h 22m")),
    Row("64:64 stream", "stream", 128, 0.0, 4, 231.34, 128.47, 98.77,
        _minutes("4h 25m", "9h 41m", "15h 2m", "1d 1h 53m")),
    Row("64:64 partial 0.1", "0.1", 128, 0.1, 4, 171.30, 58.17, 109.12,
        _minutes("3h 53m", "8h 37m", "14h 25m", "19h 59m")),
    Row("64:64 partial 0.3", "0.3", 128, 0.3, 4, 146.11, 38.88, 103.22,
        _minutes("3h 18m", "6h 49m", "11h 40m", "17h 20m"), LENGTHS_DRIFT),
    Row("64:64 require_batches 1", "rb 1", 128, 0.5, 1, 203.47, 30.88, 181.08,
        _minutes("3h 31m", "8h 29m", "17h 36m"), BATCHES_CHANGE_LENGTHS + STAGES_EXCEED_STEP),
    Row("64:64 require_batches 2", "rb 2", 128, 0.5, 2, 158.72, 26.32, 128.08,
        _minutes("3h 35m", "7h 38m", "13h 57m"), BATCHES_CHANGE_LENGTHS),
    Row("64:64 require_batches 4", "64:64", 128, 0.5, 4, 124.64, 25.62, 95.06,
        _minutes("3h 13m", "6h 46m", "10h 53m"), SAME_RUN),
)  # fmt: skip

NOT_PREDICTED = {
    "64:64 stale 0.5": "the source leaves the row blank",
    "Qwen2.5-32B, all four rows": "the source leaves the table empty",
    "acc/mean@1": "no model of learning here",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Pairs what is to be predicted with the only run that its prediction may read."""

    row: Row
    colocated: Colocated


def speedup(row: Row, hundreds: int) -> float:
    """Return by how much the first so many hundred steps took less time than colocated."""
    return COLOCATED[row.cards].total_min[hundreds - 1] / row.total_min[hundreds - 1]


def whole_runs() -> tuple[Case, ...]:
    """Return all rows as published: means over the whole run.

    The colocated run's stages are those of as many steps as the row has: 300 of its 400 for the
    ablation of require_batches, scaled alike by its total times.
    """
    return tuple(Case(row, _shortened(COLOCATED[row.cards], len(row.total_min))) for row in ROWS)


def first_hundred() -> tuple[Case, ...]:
    """Return the first 100 steps of all runs, in which lengths have drifted least.

    Stages of these steps are not published: those of the whole run are scaled alike, by the total
    times. Each run once: without the last row, whose first steps are those of 64:64 partial 0.5.
    """
    found: list[Case] = []
    for row in ROWS:
        if row.doubt == SAME_RUN:
            continue
        factor = row.total_min[0] / (row.total_min[-1] / len(row.total_min))
        scaled = replace(
            row,
            step_s=row.step_s * factor,
            gen_s=row.gen_s * factor,
            update_s=row.update_s * factor,
        )
        found.append(Case(scaled, _shortened(COLOCATED[row.cards], 1)))
    return tuple(found)


def _shortened(colocated: Colocated, hundreds: int) -> Colocated:
    total = colocated.total_min
    factor = (total[hundreds - 1] / hundreds) / (total[-1] / len(total))
    return replace(
        colocated,
        step_s=colocated.step_s * factor,
        gen_s=colocated.gen_s * factor,
        old_log_prob_s=colocated.old_log_prob_s * factor,
        update_s=colocated.update_s * factor,
    )


def drift(total_min: tuple[int, ...]) -> float:
    """Return how much longer the third hundred steps took than the first."""
    return (total_min[2] - total_min[1]) / total_min[0]
