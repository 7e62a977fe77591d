"""Random failures of servers and learner, on the code that ships and a virtual clock.

    python -m benchmarks fault_schedules [--schedules N] [--seed N]

Every schedule is a run of random size (students, teachers, batch, staleness bound, checkpoints),
in which servers are killed or hang and the learner is killed, at random moments, while servers are
started again (one start of five fails). What must hold: the run makes all its updates; no sample is
trained on twice in the history that survives, and each is admitted, consumed or dropped; each
token's label names the weights that sampled it, also after a rollback; no token is sampled from a
mixture; the bound on staleness holds.

The control must fail, of the schedules in which requests were repeated or the learner started
again: the same with neither. A few hold all the same, where the faults then hit nothing.

What it cannot say: how long anything takes, and what real processes do beside dying and hanging.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.fault_schedules.world import STUDENT, TEACHER, Plan, World
from megatron_opd.config.schema import Config
from megatron_opd.controller.schedule import Schedule
from megatron_opd.sim.clock import run_virtual

Tree = dict[str, Any]
CONTROLS = 0.2
"""Share of the schedules that the control repeats."""
LIMIT_S = 7200.0
"""A run that takes longer on the virtual clock has stopped for ever."""
RUN_S = 60.0
"""Faults come in so many seconds: most runs take about as long."""


def measure(options: Sequence[str] = ()) -> Tree:
    """How many schedules held, what happened in them, and the control."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fault_schedules")
    parser.add_argument("--schedules", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(list(options))
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    found = {seed: outcome(plan_of(seed)) for seed in seeds}
    total: Counter[str] = Counter()
    for figures in found.values():
        total.update(figures.get("happened", {}))
        numbers = {k: v for k, v in figures.items() if isinstance(v, int) and k != "held"}
        total.update(numbers)
    controls = [
        outcome(replace(plan_of(seed), readmits=False))
        for seed in list(seeds)[: max(1, int(CONTROLS * len(seeds)))]
        if found[seed].get("samples_readmitted", 0) + found[seed].get("learner_restarts", 0)
    ]
    return {
        "schedules": len(found),
        "held": sum(figures["held"] for figures in found.values()),
        "failed": {seed: f["cause"] for seed, f in found.items() if not f["held"]},
        "total": dict(sorted(total.items())),
        "control": {"schedules": len(controls), "held": sum(f["held"] for f in controls)},
    }


def outcome(plan: Plan) -> Tree:
    """Run it; whether all held, and what happened."""
    sizes = {STUDENT: plan.students, TEACHER: plan.teachers}
    server = {"model": "unused", "dtype": "float32", "max_restarts": 1000}
    if not plan.readmits:
        server["max_restarts"] = 0
    config = Config.model_validate(
        {
            "data": {"train": "unused"},
            **{role: server | {"servers": count} for role, count in sizes.items()},
            "weight_sync": {"verify_every": 3, "timeout_s": 60.0},
        }
    )

    async def run() -> Tree:
        async with asyncio.timeout(LIMIT_S):
            return await World(plan, config).run()

    try:
        return {"held": True, **run_virtual(run())}
    except Exception as error:  # noqa: BLE001  whatever it is, the schedule did not hold
        return {"held": False, "cause": f"{type(error).__name__}: {error}"}


def plan_of(seed: int) -> Plan:
    """One random run and its faults."""
    rng = random.Random(seed)
    students, teachers = rng.randint(1, 4), rng.randint(1, 2)
    batch, staleness = rng.randint(1, 6), rng.randint(0, 4)
    schedule = Schedule(
        updates=rng.randint(3, 12),
        batch_size=batch,
        max_staleness=staleness,
        rollout_slots=rng.randint(1, 12),
        score_slots=rng.randint(1, 4),
        hold_batches=rng.randint(0, staleness),
    )
    urls = [f"http://{STUDENT}-{i}:1" for i in range(students)]
    urls += [f"http://{TEACHER}-{i}:1" for i in range(teachers)]
    faults: list[tuple[float, str, str]] = []
    for _ in range(rng.randint(0, 6)):
        whom = rng.choice([*urls, "learner"])
        what = "killed" if whom == "learner" or rng.random() < 0.7 else "hung"
        faults.append((rng.uniform(0.0, RUN_S), what, whom))
    return Plan(seed, schedule, students, teachers, rng.randint(1, 4), tuple(sorted(faults)))
