"""One random run: its schedule, how long everything takes, what fails, and how it ends."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_opd.buffer.spread import GroupRule
from megatron_opd.config.schedule import ScheduleConfig, least_bound
from megatron_opd.config.selection import RewardSpread
from megatron_opd.controller.pipeline import MIN_DROPS_IN_A_ROW
from megatron_opd.controller.schedule import Schedule

Type = Literal["sync", "step_off", "stream", "stale", "partial", "async", "controlled"]
TYPES: tuple[Type, ...] = (
    "sync",
    "step_off",
    "stream",
    "stale",
    "partial",
    "async",
    "async",
    "async",
    "controlled",
)
"""Async, which takes any numbers, as often as three others."""


def _never(uid: int) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Answers:
    """Says how the environment of a run's trajectories answers their turns.

    turns: of a trajectory, by uid. seconds: of an answer. fails: whether it fails after this turn.
    slots: turns that are sampled at once; while the environment answers, none is taken.
    """

    turns: Callable[[int], int]
    seconds: Callable[[], float]
    fails: Callable[[int], bool]
    slots: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Says how a run goes; seconds are virtual.

    rollout_s, score_s: by uid; of a trajectory, that of each turn. train_s: by update. sync_s: by
    version. loses, rejects: whether this rollout, this score is to be dropped. down: (when, which
    server, for how long). losing_syncs: versions whose weight sync loses a server on the way;
    fatal_sync: one that fails for good. overlap: updates run beside weight syncs. prompts: how many
    there are; None: no end. end_s: when it is told to end early; resumes: whether it goes on then.
    rewards: of a response, by uid.
    answers: what the environment of trajectories does; None: responses of a single turn.
    """

    schedule: Schedule
    rollout_s: Callable[[int], float] = lambda uid: 1.0
    score_s: Callable[[int], float] = lambda uid: 0.1
    train_s: Callable[[int], float] = lambda update: 0.5
    sync_s: Callable[[int], float] = lambda version: 0.2
    loses: Callable[[int], bool] = _never
    rejects: Callable[[int], bool] = _never
    servers: int = 1
    down: tuple[tuple[float, int, float], ...] = ()
    losing_syncs: frozenset[int] = frozenset()
    fatal_sync: int | None = None
    overlap: bool = False
    prompts: int | None = None
    end_s: float | None = None
    resumes: bool = False
    rewards: Callable[[int], float] = lambda uid: float(uid % 2)
    answers: Answers | None = None


def has_environment(seed: int) -> bool:
    """Return whether the run of this seed is one of trajectories."""
    return seed % 2 == 1


def plan_of(seed: int) -> Plan:
    """Return one random run: stragglers, drops, faults, slow and failing weight syncs."""
    rng = random.Random(seed)
    group_size = rng.choice((1, 1, 2, 3))
    batch_size = group_size * rng.randint(1, 3)
    updates = rng.randint(1, 7)
    slots = rng.randint(1, 24)
    kind = kind_of(rng, batch_size)
    schedule = Schedule(updates, batch_size, kind, slots, rng.randint(1, 24), group_size)
    lucky = random.Random(rng.random())
    drop_rate, tail = rng.choice((0.0, 0.1)), rng.choice((1.0, 30.0))
    drops = iter(range(MIN_DROPS_IN_A_ROW - 1))  # one more in a row would end the run, rightly

    def unlucky(uid: int) -> bool:
        return lucky.random() < drop_rate and next(drops, None) is not None

    rollout_s, score_s = rng.uniform(0.1, 3.0), rng.uniform(0.01, 2.0)
    train_s, sync_s = rng.random(), rng.choice((0.01, 0.3, 3.0))
    servers, span_s = rng.randint(1, 3), updates * (rollout_s + train_s + sync_s)
    down = tuple(
        (rng.uniform(0, span_s), rng.randrange(servers), rng.choice((0.5, 5.0, 50.0)))
        for _ in range(rng.choice((0, 0, 1, 3)))
    )
    versions = range(1, updates + 1)
    few = group_size * rng.randint(1, max(1, updates * batch_size // group_size))
    plan = Plan(
        schedule,
        rollout_s=lambda uid: rollout_s * (tail if lucky.random() < 0.1 else lucky.random()),
        score_s=lambda uid: score_s * lucky.random(),
        train_s=lambda update: train_s * lucky.random(),
        sync_s=lambda version: sync_s * lucky.random(),
        loses=unlucky,
        rejects=unlucky,
        servers=servers,
        down=down,
        losing_syncs=frozenset(v for v in versions if rng.random() < 0.1),
        fatal_sync=rng.choice(versions) if rng.random() < 0.05 else None,
        overlap=rng.random() < 0.3,
        prompts=few if rng.random() < 0.2 else None,
        end_s=rng.uniform(0, span_s) if rng.random() < 0.2 else None,
        resumes=rng.random() < 0.7,
    )
    if group_size > 1 and rng.random() < 0.5:
        plan = _filtered(plan, rng)
    return _with_environment(plan, rng) if has_environment(seed) else plan


def _with_environment(plan: Plan, rng: random.Random) -> Plan:
    """Return the run with trajectories of up to five turns, whose answers take no time or long."""
    lot, most, answer_s = (
        random.Random(rng.random()),
        rng.randint(1, 5),
        rng.choice((0.0, 0.5, 5.0)),
    )
    tail, slots = rng.choice((1.0, 30.0)), plan.schedule.rollout_slots
    answers = Answers(
        turns=lambda uid: lot.randint(1, most),
        seconds=lambda: answer_s * (tail if lot.random() < 0.1 else lot.random()),
        fails=plan.loses,
        slots=slots,
    )
    schedule = replace(plan.schedule, rollout_slots=sys.maxsize)
    return replace(plan, schedule=schedule, answers=answers, loses=_never)


def _filtered(plan: Plan, rng: random.Random) -> Plan:
    """Return the run with groups that are dropped for their rewards, some of them alike."""
    size, seed, share = plan.schedule.group_size, rng.random(), rng.choice((0.3, 0.7, 1.0))
    spread = RewardSpread(most_in_a_row=rng.randint(1, 4), exhausted="keep")

    def reward(uid: int) -> float:
        group, member = divmod(uid, size)
        lot = random.Random(f"{seed} {group}")
        alike, right = lot.random() < share, lot.random() < 0.5
        return float(right) if alike else float(member % 2)

    schedule = replace(plan.schedule, groups=GroupRule(spread))
    return replace(plan, schedule=schedule, rewards=reward)


def kind_of(rng: random.Random, batch_size: int) -> ScheduleConfig:
    """Return one random schedule of a random type."""
    name = rng.choice(TYPES)
    keys: dict[str, Any] = {"type": name}
    if name in ("stream", "stale", "partial", "async"):
        keys["sync_every"] = rng.randint(2 if name == "stream" else 1, 4)
    if name in ("step_off", "controlled"):
        keys["max_staleness"] = float(rng.randint(1, 3))
    elif name in ("stale", "partial"):
        keys["max_staleness"] = rng.choice((0.1, 0.5, 1.0, 1.7, 3.0))
    elif name == "async":
        keys["max_staleness"] = rng.choice((0.0, 0.1, 0.5, 1.0, 1.7, 3.0))
    policies = {"step_off": ("keep",), "stale": ("keep",), "partial": ("in_place", "abort")}
    keys["in_flight"] = rng.choice(policies.get(name, ("in_place", "keep", "abort")))
    if name != "controlled" and rng.random() < 0.5:
        numbers = ScheduleConfig(**keys)
        least = least_bound(batch_size, numbers.sync_every, numbers.max_staleness)
        return ScheduleConfig(**keys, order="completion", max_age=least + rng.randint(0, 3))
    if name == "async" and rng.random() < 0.5:
        keys["hold_batches"] = rng.randint(0, int(keys["max_staleness"] * keys["sync_every"]))
    return ScheduleConfig(**keys)
