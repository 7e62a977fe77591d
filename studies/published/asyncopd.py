"""Predicts the speed-ups of AsyncOPD (2606.24143, Section 7 and App. G) from assumptions alone.

Nothing is fitted: the paper's tables of throughput are images, and only their range is in its text.
Stated there: one node of 8 B200, one GPU for the teacher; strict sync gives the other seven to
sampling and training in turn, two-step-off and async (tau = 4) four and three; batches of 256 in
mini-batches of 64; throughput after five updates. Table 3 (settings) is an image too, so the limits
of lengths and requests are those of the authors' public example configuration, and what neither
says is in Assumptions.

How strict sync is simulated: schedule sync with engines and learner of seven GPUs each. Scoring
begins once the last response is there, as the paper's Figure 9 has it, so its time is that of the
learner, in sequence; switching GPUs between the stages takes switch_s. A learner's GPUs
are one rank that is as many times faster, since 256 samples cannot be shared out to seven ranks
equally: the imbalance of ranks is left out, as is FSDP's communication.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import msgspec

from megatron_opd.config.schema import Config
from megatron_opd.sim.costs import Costs, LearnerCost, LognormalLengths, ScoreCost, SyncCost
from megatron_opd.sim.hardware import (
    NETWORK_S,
    SYNC_S,
    engine_cost,
    learner_cost,
    score_cost,
)
from megatron_opd.sim.world import simulate
from megatron_opd.sizing.gpus import ASSUMED, CATALOGUE, GB
from studies.published.models import model_spec

STUDENTS = ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")
TEACHER, GPU = "Qwen3-30B-A3B", "b200"
DRAWS = (1, 64)
SHARED_GPUS, SAMPLING_GPUS, TRAINING_GPUS = 7, 4, 3
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"type": "sync"},
    "step_off 2": {"type": "step_off", "max_staleness": 2.0},
    "async 4": {"type": "async", "max_staleness": 4.0},
}
BATCH, MINI_BATCH, UPDATES = 256, 64, 20
MAX_RESPONSE, ENGINE_REQUESTS, TEACHER_REQUESTS = 16384, 512, 16
PUBLISHED = {
    "async over sync, all": (1.6, 3.8),
    "async over sync, MC64, at most": 3.8,
    "async over sync, MC1, at most": 3.3,
}
"""Section 7 and App. G; for Qwen3-Base at most 2.7 (MC64) and 3.3 (MC1), else 3.8 and 3.2."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Holds what the paper's text does not state.

    mean, cv: tokens of a response before the cut, and their spread. train_mfu: of the learner.
    draw_s: teacher's seconds for each cached action of a token, besides its forward pass.
    switch_s: seconds of an update in which strict sync hands the GPUs over, there and back.
    """

    mean: float = 4000.0
    cv: float = 1.0
    train_mfu: float = ASSUMED.train_mfu
    draw_s: float = 1e-6
    switch_s: float = 5.0
    prompt_tokens: int = 256


VARIED: dict[str, tuple[float, ...]] = {
    "mean": (2000.0, 8000.0),
    "cv": (0.5, 2.0),
    "train_mfu": (0.1, 0.2),
    "draw_s": (1e-7, 3e-6),
    "switch_s": (0.0, 20.0),
}
"""Other values of each assumption, one at a time, for the student in the middle."""
MIDDLE = "Qwen3-4B"


def settings_of(schedule: str) -> Config:
    """Return the project's configuration of a schedule."""
    gpus = SHARED_GPUS if schedule == "sync" else SAMPLING_GPUS
    return Config.model_validate(
        {
            "run": {"max_steps": UPDATES},
            "data": {"train": "unused"},
            "student": {
                "model": "unused",
                "servers": gpus,
                "max_running_requests": ENGINE_REQUESTS,
                "mem_fraction_static": 0.85,
            },
            "teacher": {"model": "unused", "max_running_requests": TEACHER_REQUESTS},
            "buffer": {"batch_size": BATCH},
            "learner": {"num_mini_batches": BATCH // MINI_BATCH},
            "schedule": SCHEDULES[schedule],
            "rollout": {"max_new_tokens": MAX_RESPONSE, "concurrency": ENGINE_REQUESTS * gpus},
            "scoring": {"concurrency": TEACHER_REQUESTS},
        }
    )


def costs_of(student: str, draws: int, schedule: str, assumed: Assumptions) -> Costs:
    """Predict the costs of a run from the data sheet of its GPU."""
    config, spec, hardware = settings_of(schedule), model_spec(student), CATALOGUE[GPU]
    scoring = score_cost(model_spec(TEACHER), config.all_teachers["teacher"], hardware)
    scoring = msgspec.structs.replace(scoring, token_s=scoring.token_s + draws * assumed.draw_s)
    one_gpu = learner_cost(spec, config, hardware)
    gpus = SHARED_GPUS if schedule == "sync" else TRAINING_GPUS
    rate = gpus * assumed.train_mfu / ASSUMED.train_mfu
    learner = LearnerCost(
        update_s=one_gpu.update_s / gpus,
        token_s=one_gpu.token_s / rate,
        token_context_s=one_gpu.token_context_s / rate,
    )
    if schedule == "sync":
        learner = msgspec.structs.replace(
            learner,
            update_s=learner.update_s + assumed.switch_s,
            token_s=learner.token_s + scoring.token_s,
        )
        scoring = ScoreCost()
    engine = engine_cost(spec, config.student, hardware)
    bandwidth = hardware.hbm_gbs * GB
    sync_s = SYNC_S + engine.step_s * bandwidth / (hardware.node_gbs * GB * ASSUMED.link)
    return Costs(
        engine=engine,
        teachers={"teacher": scoring},
        learner=learner,
        sync=SyncCost(sync_s=sync_s, paused_s=sync_s),
        network_s=NETWORK_S,
    )


@cache
def tokens_per_s(student: str, draws: int, schedule: str, assumed: Assumptions) -> float:
    """Predict the training throughput as the paper defines it."""
    costs = costs_of(student, draws, schedule, assumed)
    lengths = LognormalLengths(
        mean=assumed.mean, cv=assumed.cv, prompt_tokens=assumed.prompt_tokens
    )
    found = simulate(settings_of(schedule), costs, lengths).tokens_per_s
    assert found is not None, "fewer updates than the metric leaves out"
    return found


def speedup(student: str, draws: int, schedule: str, assumed: Assumptions) -> float:
    """Predict how many times faster than sync a schedule is."""
    asynchronous = tokens_per_s(student, draws, schedule, assumed)
    return round(asynchronous / tokens_per_s(student, draws, "sync", assumed), 2)


def study() -> dict[str, Any]:
    """Return the predicted speed-ups, the published range, and what each assumption changes."""
    assumed, named = Assumptions(), [name for name in SCHEDULES if name != "sync"]
    predicted = {
        name: {
            f"MC{draws}": {student: speedup(student, draws, name, assumed) for student in STUDENTS}
            for draws in DRAWS
        }
        for name in named
    }
    every = {name: [s for row in predicted[name].values() for s in row.values()] for name in named}
    return {
        "published": PUBLISHED,
        "assumptions": asdict(assumed),
        "predicted": predicted,
        "predicted_range": {name: [min(found), max(found)] for name, found in every.items()},
        "sensitivity_async_4": {
            f"{name} = {value:g}": {
                f"MC{draws}": speedup(MIDDLE, draws, "async 4", changed(assumed, name, value))
                for draws in DRAWS
            }
            for name, values in VARIED.items()
            for value in values
        },
    }


def changed(assumed: Assumptions, name: str, value: float) -> Assumptions:
    """Return the assumptions with another value of one."""
    values: dict[str, Any] = {name: value}
    return replace(assumed, **values)
