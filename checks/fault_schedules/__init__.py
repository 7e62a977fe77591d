"""Random failures of servers and learner, on the code that ships and a virtual clock.

    python -m checks fault_schedules [--schedules N] [--seed N] [--jobs N]

Every schedule is a run of random size (students, teachers, batch, staleness bound, checkpoints), in
which servers are killed, hang, jam (they answer that they are alive, and nothing else) or stall one
request, the learner is killed, and one prompt may be one that no server can sample, while servers
are started again (one start of five fails). What must hold: the run makes all its updates; no
sample is trained on twice in the history that survives, and each is admitted, consumed or dropped;
none is dropped unless it timed out rollout.attempts times; none times out where nothing stalls,
however long it queues or is paused; each token's label names the weights that sampled it, also
after a rollback; no token is sampled from a mixture; the bound on staleness holds.

Controls must fail, of the schedules that needed what each is without: requests that nobody repeats
and servers that nobody starts again; a learner that nobody starts again; requests without a limit.
A few hold all the same, where the faults then hit nothing.

Rows are kept in runs/fault_schedules/rows.jsonl as they come; stopped, it goes on where it was. A
row counts only for the code that made it.

What it cannot say: how long anything takes, and what real processes do beside dying and hanging.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checks.fault_schedules.world import STUDENT, TEACHER, Plan, Without, World
from harness.case_rows import append_row, fingerprint_of, kept_rows, say
from harness.processes import mapped
from megatron_opd.config.schedule import ScheduleConfig
from megatron_opd.config.schema import Config
from megatron_opd.controller.schedule import Schedule
from megatron_opd.metrics.summary import commit
from megatron_opd.sim.clock import run_virtual

Tree = dict[str, Any]
ROWS = Path("runs") / "fault_schedules" / "rows.jsonl"
CONTROLS: dict[Without, str] = {
    "readmission": "samples_readmitted",
    "learner_restarts": "learner_restarts",
    "deadlines": "requests_timed_out",
}
"""What a control is without, and the figure of the schedules that needed it."""
CONTROLLED = 0.1
"""Share of the schedules that the controls repeat."""
LIMIT_S = 1800.0
"""A run that takes longer on the virtual clock has stopped for ever: the longest take 400 s."""
RUN_S = 60.0
"""Faults come in so many seconds: most runs take about as long."""
SAY_EVERY = 500


def measure(options: Sequence[str] = (), *, rows: Path = ROWS) -> Tree:
    """Run what is missing; how many schedules held, what happened in them, and the controls."""
    parser = argparse.ArgumentParser(prog="python -m checks fault_schedules")
    parser.add_argument("--schedules", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    arguments = parser.parse_args(list(options))
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    run = Recorded(rows, arguments.jobs)
    found = run.all({f"{seed}": plan_of(seed) for seed in seeds})
    controls: Tree = {}
    for without, needed in CONTROLS.items():
        some = list(seeds)[: max(1, int(CONTROLLED * len(seeds)))]
        hit = [seed for seed in some if found[f"{seed}"].get(needed, 0)]
        plans = {f"{s} without {without}": replace(plan_of(s), without=without) for s in hit}
        held = sum(figures["held"] for figures in run.all(plans).values())
        controls[without] = {"schedules": len(plans), "held": held}
    total: Counter[str] = Counter()
    for figures in found.values():
        total.update(figures.get("happened", {}))
        numbers = {k: v for k, v in figures.items() if isinstance(v, int) and k != "held"}
        total.update(numbers)
    return {
        "run_commits": sorted(run.commits),
        "schedules": len(found),
        "held": sum(figures["held"] for figures in found.values()),
        "failed": {seed: f["cause"] for seed, f in found.items() if not f["held"]},
        "total": dict(sorted(total.items())),
        "longest_s": round(max(f.get("seconds", 0.0) for f in found.values())),
        "controls": controls,
    }


class Recorded:
    """Runs plans and keeps a row of each. commits: those that made the rows used."""

    def __init__(self, rows: Path, jobs: int) -> None:
        self._rows, self._jobs = rows, jobs
        self._print = fingerprint_of("", "checks/fault_schedules")
        self._commit = str(commit())
        self.commits: set[str] = set()

    def all(self, plans: dict[str, Plan]) -> dict[str, Tree]:
        """Return {name: figures}, in order; those without a row are run."""
        kept = kept_rows(self._rows, dict.fromkeys(plans, self._print))
        missing = [name for name in plans if name not in kept]
        done = mapped(outcome, [plans[name] for name in missing], self._jobs, chunk=8)
        for number, (name, figures) in enumerate(zip(missing, done, strict=True), 1):
            made_by = {"fingerprint": self._print, "commit": self._commit}
            kept[name] = {"name": name, **made_by, "figures": figures}
            append_row(self._rows, kept[name])
            if number % SAY_EVERY == 0:
                say(f"{number}/{len(missing)} of {len(plans)}")
        self.commits |= {row["commit"] for row in kept.values()}
        return {name: kept[name]["figures"] for name in plans}


def outcome(plan: Plan) -> Tree:
    """Run it; whether all held, and what happened."""
    sizes = {STUDENT: plan.students, TEACHER: plan.teachers}
    restarts = 0 if plan.without == "readmission" else 1000
    server = {"model": "unused", "dtype": "float32", "max_restarts": restarts}
    config = Config.model_validate(
        {
            "data": {"train": "unused"},
            **{role: server | {"servers": count} for role, count in sizes.items()},
            "support": {"type": "path"},
            "weight_sync": {"verify_every": 3, "timeout_s": 60.0},
        }
    )

    async def run() -> Tree:
        async with asyncio.timeout(LIMIT_S):
            return await World(plan, config).run()

    logger = logging.getLogger("megatron_opd")
    level = logger.level
    logger.setLevel(logging.ERROR)  # a run with faults warns all the time
    try:
        return {"held": True, **run_virtual(run())}
    except Exception as error:  # noqa: BLE001  whatever it is, the schedule did not hold
        return {"held": False, "cause": f"{type(error).__name__}: {error}"}
    finally:
        logger.setLevel(level)


def kind_of(rng: random.Random) -> ScheduleConfig:
    """One random kind of schedule."""
    every, ahead = rng.choice((1, 1, 2, 3)), rng.choice((0.0, 0.5, 1.0, 2.0, 4.0))
    order = rng.choice(("admission", "admission", "completion"))
    hold = rng.randint(0, int(ahead * every)) if order == "admission" else 0
    in_flight = rng.choice(("in_place", "keep", "abort"))
    return ScheduleConfig(
        max_staleness=ahead,
        sync_every=every,
        order=order,
        hold_batches=hold,
        in_flight=in_flight,
    )


def plan_of(seed: int) -> Plan:
    """One random run and its faults."""
    rng = random.Random(seed)
    students, teachers = rng.randint(1, 4), rng.randint(1, 2)
    batch = rng.randint(1, 6)
    schedule = Schedule(
        updates=rng.randint(3, 12),
        batch_size=batch,
        kind=kind_of(rng),
        rollout_slots=rng.randint(1, 12),
        score_slots=rng.randint(1, 4),
    )
    urls = [f"http://{STUDENT}-{i}:1" for i in range(students)]
    urls += [f"http://{TEACHER}-{i}:1" for i in range(teachers)]
    faults: list[tuple[float, str, str]] = []
    for _ in range(rng.randint(0, 6)):
        whom = rng.choice([*urls, "learner"])
        kinds = ["killed"] if whom == "learner" else ["killed"] * 4 + ["hung", "jammed", "stalled"]
        faults.append((rng.uniform(0.0, RUN_S), rng.choice(kinds), whom))
    return Plan(
        seed,
        schedule,
        students,
        teachers,
        rng.randint(1, 4),
        tuple(sorted(faults)),
        slots=rng.randint(1, 4),
        pace_s=rng.uniform(0.05, 0.4),
        poison=rng.randrange(40) if rng.random() < 0.1 else None,
    )
