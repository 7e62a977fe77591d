"""Every kind of schedule on the arithmetic example: throughput, idle time, staleness, accuracy.

    python -m studies schedules [--limit N] > benchmarks/results/schedules.json

One student server, one teacher server and one learner rank, each of one thread, on the same data
and with the same number of updates; only `schedule` changes. Five groups:

  mc64        every type, order completion, in_flight abort, and time_shared, with 64 draws a
              position
  mc1         sync and async with one draw, whose teacher has less to score
  long_tail   one prompt in ten has sums of 16 digits instead of 2, so that a few responses take
              several times as long as the others
  balanced    a student with wider experts that computes the same (studies/widened.py): sampling
              and training take about as long as each other, as on a cluster that is split well;
              with the demo's own student sampling takes several times as long as training
  split       two student servers instead of one

All run with three seeds, but the types that are not compared with one. The runs share two cores
among three processes that are never idle at the same time, so the ratio of async to sync is bounded
by what the cores allow, not by the schedule alone; and what a schedule costs in accuracy after 40
updates says nothing about longer runs.

sync_shared is sync whose student server and learner take turns on the cores (schedule.time_shared)
with two threads each: a stage that works alone has both cores, instead of one while the other is
idle. The teacher keeps its one thread. On a CPU no memory changes hands, so what it costs to move a
GPU's memory is not in its figures. They may say how near a sync run that uses two cores in turn
comes to an async one that uses them at once; nothing follows for GPUs.

Rows are kept in benchmarks/results/schedules_rows.jsonl; stopped, the study goes on where it was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_opd.data.tasks.arithmetic import solve
from studies.grid.study import run_study
from studies.grid.trials import Launch, Trial, launch
from studies.widened import write_widened

CONFIG = Path("examples/arithmetic/demo.yaml")
STUDENT = Path("examples/arithmetic/student")
LONG_TAIL = Path("runs") / "schedules" / "long_tail.jsonl"
WIDE, WIDE_FEATURES = Path("runs") / "schedules" / "wide_student", 2560
PROMPTS, LONG_SHARE, SHORT_DIGITS, LONG_DIGITS = 4096, 0.1, 2, 16
SEEDS = (1, 2, 3)
COMMON = {
    "run.max_steps": "40",
    "checkpoint.export_hf": "false",
    "evaluation.problems": "64",
    "evaluation.samples": "2",
    "student.base_port": "22100",  # below the range from which the system hands out ports
    "metrics": "{tensorboard: false, trace: true, progress: false}",
}
KINDS: dict[str, dict[str, str]] = {
    "sync": {"schedule.type": "sync"},
    "async": {"schedule.type": "async"},
    "sync_shared": {
        "schedule.type": "sync",
        "schedule.time_shared": "true",
        "student.threads": "2",
        "learner.threads": "2",
    },
    "step_off": {"schedule.type": "step_off"},
    "stream": {"schedule.type": "stream"},
    "stale": {"schedule.type": "stale"},
    "partial": {"schedule.type": "partial"},
    "controlled": {"schedule.type": "controlled"},
    "async_tau4": {"schedule.type": "async", "schedule.max_staleness": "4"},
    "completion": {"schedule.max_staleness": "4", "schedule.order": "completion"},
    "abort": {"schedule.type": "partial", "schedule.in_flight": "abort"},
}
COMPARED = ("sync", "async")
WITH_TURNS = (*COMPARED, "sync_shared")
ORDERS = ("async_tau4", "completion")
LONG = {
    "data.train": str(LONG_TAIL),
    "rollout.max_new_tokens": "192",
    "learner.max_tokens_per_microbatch": "8192",
}
BALANCED = {"student.model": str(WIDE)}
ONE_DRAW = {"support": "{type: mc, m: 1}"}


def trial(setting: str, kind: str, seed: int, **changed: str) -> Trial:
    """One run. changed: overrides of what all have in common."""
    return Trial(setting, kind, seed, CONFIG, COMMON | KINDS[kind] | changed)


def trials() -> list[Trial]:
    """The runs, in the order in which they are made: what is compared first, seed by seed."""
    found = [trial("mc64", kind, seed) for seed in SEEDS for kind in WITH_TURNS]
    found += [trial("mc64", kind, SEEDS[0]) for kind in KINDS if kind not in WITH_TURNS]
    split = COMMON | {"student.servers": "2"}
    found.append(Trial("split", "two_students", SEEDS[0], CONFIG, split))
    for seed in SEEDS:
        found += [trial("balanced", kind, seed, **BALANCED) for kind in (*COMPARED, "async_tau4")]
        found += [trial("long_tail", kind, seed, **LONG) for kind in (*COMPARED, *ORDERS)]
        found += [trial("mc1", kind, seed, **ONE_DRAW) for kind in COMPARED]
    return found


def write_long_tail(path: Path) -> None:
    """Write the prompts of the group long_tail; the same ones every time."""
    luck = random.Random(0)
    lines: list[str] = []
    for _ in range(PROMPTS):
        digits = LONG_DIGITS if luck.random() < LONG_SHARE else SHORT_DIGITS
        left, right = (luck.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        problem = solve(left, "+", right)
        lines.append(json.dumps({"prompt": problem.prompt, "answer": problem.answer}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def prepare() -> None:
    """Write the data and the model that runs use besides those of the example."""
    write_long_tail(LONG_TAIL)
    write_widened(STUDENT, WIDE, WIDE_FEATURES)


def measure(
    options: Sequence[str] = (),
    *,
    launch: Launch = launch,
    out: Path | None = None,
    rows: Path | None = None,
) -> dict[str, Any]:
    """Run what is missing; everything that is finished by (setting, method), and the ratios."""
    prepare()
    found = run_study("schedules", trials(), options, launch=launch, out=out, rows=rows)
    return found | {"async_over_sync": ratios(found["entries"])}


def ratios(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Trained tokens a second of async over those of sync, by setting."""
    speed = {
        (entry["setting"], entry["method"]): entry["figures"]["train_tokens_per_s"]["mean"]
        for entry in entries
    }
    return {
        setting: round(speed[setting, "async"] / speed[setting, "sync"], 2)
        for setting in sorted({setting for setting, _ in speed})
        if {(setting, kind) for kind in COMPARED} <= speed.keys()
    }
