"""What must hold of every schedule, over 200,000 random runs of the real controller.

    python -m checks schedule_properties [--runs N] [--seed N] [--jobs N]

A run is small and its clock virtual: a schedule of any type, order, in_flight policy and group
size; in every second run trajectories of several turns, between which an environment answers, at
once, late, or not at all; stragglers, drops, groups that are dropped because their rewards are
alike (selection.groups), servers that are lost and come back, weight syncs that are slow, lose a
server, run beside updates or fail for good; prompts that run out in the middle of a batch; an end
that comes early, and what follows it when the run is resumed. Checked: permits are conserved at
every moment; each prompt is consumed once or dropped for a counted reason, or waits where the run
was told to end; no token is staler than the bound, or of weights to come, or older than the one
before it; every group is whole; with order admission batches are in that order; without in_place no
response, and no turn of a trajectory, is sampled across a weight sync; which groups are dropped for
their rewards follows from the order of admission alone, and never more in a row than allowed;
weight syncs come in order, the last one after the last update; nothing stalls.

Controls must fail in some of their runs: permits returned at the end of an update and not when its
weights are live; permits returned while an environment answers; completion order without deadlines;
dropped samples that keep their permits; groups judged in the order in which they were scored; and
the checks with a bound that is one too small.

What it cannot say: anything about real processes (`fault_schedules`, `chaos`) or time.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_args

from checks.schedule_properties.checks import (
    Control,
    Leg,
    check,
    goes_on_after_a_sync,
    run_of,
    splits_a_turn,
)
from checks.schedule_properties.plans import has_environment, plan_of
from harness.case_rows import say
from harness.processes import mapped
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.records.drops import GROUP_REASONS, INCOMPLETE_BATCH

Tree = dict[str, Any]
CONTROLLED, LEAST_CONTROLLED = 0.02, 500
"""Share of the runs that every control repeats, and how many at least."""
SAY_EVERY = 10_000


def measure(options: Sequence[str] = (), *, least_controlled: int = LEAST_CONTROLLED) -> Tree:
    """Run them; how many held, what happened in those of each type, and the controls."""
    parser = argparse.ArgumentParser(prog="python -m checks schedule_properties")
    parser.add_argument("--runs", type=int, default=200_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    arguments = parser.parse_args(list(options))
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    began_s = time.monotonic()
    failed: dict[str, str] = {}
    types: dict[str, Counter[str]] = {}
    worst: dict[str, int] = {}
    for seed, (name, figures) in zip(seeds, _outcomes(seeds, arguments.jobs, None), strict=True):
        counts = types.setdefault(name, Counter())
        if "cause" in figures:
            failed[f"{seed}"] = figures.pop("cause")
        else:
            over = figures.pop("staleness_less_bound")
            worst[name] = max(over, worst.get(name, over))
        counts.update(figures)
        if (seed - seeds[0] + 1) % SAY_EVERY == 0:
            say(f"{seed - seeds[0] + 1}/{len(seeds)}, {len(failed)} failed")
    seconds = time.monotonic() - began_s
    some = seeds[: max(least_controlled, round(CONTROLLED * len(seeds)))]
    played = [seed for seed in seeds if has_environment(seed)]
    return {
        "runs": len(seeds),
        "held": len(seeds) - len(failed),
        "with_environment": {
            "runs": len(played),
            "held": len(played) - sum(f"{seed}" in failed for seed in played),
        },
        "failed": failed,
        "runs_per_s": round(len(seeds) / seconds, 1),
        "types": {
            name: dict(sorted(types[name].items())) | {"worst_staleness_less_bound": worst[name]}
            for name in sorted(worst)
        },
        "controls": {name: _control(name, some, arguments.jobs) for name in get_args(Control)},
    }


def _control(control: Control, seeds: range, jobs: int) -> Tree:
    """How many runs a control failed in, and for what."""
    causes: Counter[str] = Counter()
    for _, figures in _outcomes(seeds, jobs, control):
        if "cause" in figures:
            causes[figures["cause"].partition(":")[0]] += 1
    return {"runs": len(seeds), "failed": causes.total(), "causes": dict(causes.most_common())}


def _outcomes(
    seeds: Sequence[int], jobs: int, control: Control | None
) -> Iterator[tuple[str, Tree]]:
    return mapped(partial(outcome, control=control), seeds, jobs, chunk=64)


def outcome(seed: int, control: Control | None = None) -> tuple[str, Tree]:
    """Make one run; its schedule's type, and what happened or why it did not hold."""
    plan = plan_of(seed)
    name = plan.schedule.kind.type
    logger = logging.getLogger("megatron_opd")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        legs = run_of(plan, control)
        check(legs, control)
    except Exception as error:  # noqa: BLE001  whatever it is, the run did not hold
        return name, {"runs": 1, "cause": _line(error)}
    finally:
        logger.setLevel(level)
    return name, {"runs": 1, **_figures(legs)}


def _line(error: Exception) -> str:
    """Return what went wrong in one line; a loop that failed says it with its name before."""
    if isinstance(error, LoopFailed):
        return str(error).removeprefix(f"{error.loop}: ")
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _figures(legs: list[Leg]) -> Tree:
    last, bound = legs[-1], legs[0].schedule.bound
    staleness = max((max(leg.staleness, default=0) for leg in legs), default=0)
    return {
        "updates": last.accounting.updates,
        "consumed": last.accounting.consumed,
        "dropped": sum(last.accounting.dropped.values()),
        "dropped_for_rewards": sum(
            last.accounting.dropped.get(reason, 0) for reason in GROUP_REASONS
        ),
        "restarts": sum(leg.servers.restarts for leg in legs),
        "servers_lost": sum(server.losses for leg in legs for server in leg.servers.all),
        "ended_early": legs[0].told_to_end,
        "resumed": len(legs) > 1,
        "failed_weight_syncs": last.failed,
        "incomplete_batches": INCOMPLETE_BATCH in last.accounting.dropped,
        "environment_failures": sum(leg.servers.failures for leg in legs),
        "synced_within_turns": sum(splits_a_turn(r) for leg in legs for r in leg.rollouts),
        "synced_between_turns": sum(goes_on_after_a_sync(r) for leg in legs for r in leg.rollouts),
        "tight": staleness == bound,
        "staleness_less_bound": staleness - bound,
    }
