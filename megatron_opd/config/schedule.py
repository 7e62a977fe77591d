"""Defines when samples are taken, when weights are synced and how far sampling may run ahead.

Every type is the same mechanism with other numbers (buffer/permits.py): a type is a name for what
its keys are when they are left out, and for what they may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from megatron_opd.config.delays import DelayConfig
from megatron_opd.config.section import NonNegativeInt, PositiveInt, Section
from megatron_opd.config.wording import shown

Type = Literal["sync", "step_off", "stream", "stale", "partial", "async", "controlled"]
InFlight = Literal["keep", "in_place", "abort"]

NATURAL: Mapping[str, Mapping[str, Any]] = {
    "sync": {"max_staleness": 0.0},
    "step_off": {"in_flight": "keep"},
    "stream": {"max_staleness": 0.0, "sync_every": 4},
    "stale": {"max_staleness": 0.5, "sync_every": 4, "in_flight": "keep"},
    "partial": {"max_staleness": 0.5, "sync_every": 4},
    "async": {},
    "controlled": {},
}
"""What each type's keys are when they are left out, where that is not the field's default."""
VERL: Mapping[str, str] = {
    "trigger_parameter_sync_step": "sync_every",
    "staleness_threshold": "max_staleness",
    "partial_rollout": "in_flight",
}
"""verl's names of keys (its fully asynchronous trainer) and ours."""
MOST_AHEAD = 1024.0
ROUNDING = 1e-6
"""What the product of a share and a number of samples may lack: 0.1 * 640 are 64."""


def permits_of(batch_size: int, sync_every: int, max_staleness: float) -> int:
    """Return how many prompts may hold a permit: those of a window, and the share beyond it."""
    window = sync_every * batch_size
    return window + math.floor(max_staleness * window + ROUNDING)


def least_bound(batch_size: int, sync_every: int, max_staleness: float) -> int:
    """Return the bound on staleness of order admission, in updates: no order has a smaller one."""
    return -(-permits_of(batch_size, sync_every, max_staleness) // batch_size) - 1


class ScheduleConfig(Section):
    """Says when samples are taken, when weights are synced, and how stale samples may be."""

    type: Type = "async"
    """What the keys below are when they are left out, and what they may be. sync: sample a batch,
    train on it, sync. step_off: the next batches are sampled meanwhile, each by one version.
    stream: several updates on samples of one version, each as soon as its batch is there. stale:
    stream, and sampling runs ahead by a share of a window; a weight sync waits for responses in
    flight. partial: stale, and responses in flight go on with the new weights. async: any numbers.
    controlled: every token is exactly max_staleness versions old (AsyncOPD App. B)."""
    max_staleness: Annotated[float, Field(ge=0, le=MOST_AHEAD)] = 1.0
    """How far sampling may run ahead of the live version, in windows of sync_every batches: 0 is
    not at all, 0.5 is half a window. That many samples more hold permits, which bounds staleness
    (`opd check` prints the bound). Raising it keeps samplers and learner busy at the same time and
    trains on older samples."""
    sync_every: PositiveInt = 1
    """Updates from one weight sync to the next. Raising it costs fewer pauses and makes samples
    staler, by as many updates."""
    in_flight: InFlight = "in_place"
    """What a weight sync does with responses that are being sampled. in_place: they wait, and go on
    with the new weights. keep: it waits until they are finished, and no new one begins. abort: they
    are thrown away and sampled anew, by the same random numbers (rollout.seeded); long ones meet
    more weight syncs, see docs/schedules.md. With an environment a response is a turn."""
    hold_batches: NonNegativeInt | None = None
    """Number of scored batches that must wait behind the one trained on (AsyncOPD App. B); fixes
    the staleness for studies. Null: max_staleness for controlled, 0 otherwise, which trains as soon
    as a batch is complete. Raising it makes samples staler."""
    delays: DelayConfig = DelayConfig()
    """With type controlled: draws how old each update's batch is, by run.seed, for studies
    (HeteroRL). It is max_staleness updates times the share that the drawn delay has of high_s,
    rounded; no older than the run. none: every batch is max_staleness old. See docs/schedules.md.
    """
    order: Literal["admission", "completion"] = "admission"
    """Order in which samples are trained on. admission: that of their prompts, so that a batch
    waits for its slowest response. completion: those that were finished first, as far as all stay
    within max_age."""
    max_age: NonNegativeInt | None = None
    """With order completion: bound on staleness, in updates; no smaller than that of order
    admission. Null: sync_every more than that. Raising it lets more samples overtake slow ones."""
    time_shared: bool = False
    """Lets student servers and learner use the same GPUs, or the same CPU cores, in turn: the
    servers release their memory for an update, the learner moves its optimizer to host memory and
    drops its gradients while they sample. Only with type sync, or max_staleness 0 and sync_every 1,
    where the two never work at once. true needs host memory for the servers' weights and the
    optimizer, and a transfer of both in each update. See docs/schedules.md."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        given = _from_verl(cast(dict[str, Any], tree))
        return {**NATURAL.get(given.get("type", "async"), {}), **given}

    @model_validator(mode="after")
    def _suits_its_type(self) -> ScheduleConfig:
        for problem in (_numbers(self), _policy(self), _held(self), _drawn(self), _order(self)):
            if problem is not None:
                raise ValueError(problem)
        return self

    @property
    def held(self) -> int:
        """Returns the number of batches that wait behind the one trained on, if it is fixed."""
        if self.hold_batches is not None:
            return self.hold_batches
        return int(self.max_staleness) if self.type == "controlled" and not self.drawn else 0

    @property
    def drawn(self) -> bool:
        """Returns whether each batch's staleness is drawn."""
        return self.delays.type != "none"

    @property
    def exact(self) -> bool:
        """Returns whether it fixes which version samples each token, whatever takes how long."""
        fixed = self.held == self.max_staleness or self.drawn
        return fixed and self.sync_every == 1 and self.order == "admission"

    def permits(self, batch_size: int) -> int:
        """Return how many prompts may hold a permit, with batches of so many samples."""
        return permits_of(batch_size, self.sync_every, self.max_staleness)

    def least_bound(self, batch_size: int) -> int:
        """Return the bound on staleness of order admission, in updates."""
        return least_bound(batch_size, self.sync_every, self.max_staleness)

    def bound(self, batch_size: int) -> int:
        """Return the bound on the staleness of a token, in updates (buffer/permits.py)."""
        least = self.least_bound(batch_size)
        if self.order == "admission":
            return least
        return least + self.sync_every if self.max_age is None else self.max_age


def _from_verl(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the section with verl's keys, if it has any, by our names. ValueError: both are."""
    names = [name for name in VERL if name in tree]
    if not names:
        return tree
    found = {key: value for key, value in tree.items() if key not in VERL}
    for name in names:
        if VERL[name] in found:
            raise ValueError(f"{name} and {VERL[name]} are two names of one key; leave one out")
        found[VERL[name]] = tree[name]
    threshold, every = found.get("max_staleness", 0), found.get("sync_every", 1)
    partial = found.get("in_flight", False)
    if not isinstance(partial, bool):
        raise ValueError(f"partial_rollout must be true or false, got {shown(partial)}")
    if isinstance(threshold, int):
        found["max_staleness"] = float(threshold)
    # as verl has it: without stale samples nothing is in flight
    found.pop("in_flight", None)
    kind = ("partial" if partial else "stale") if threshold else ("stream" if every > 1 else "sync")
    return {"sync_every": 1, "max_staleness": 0.0, "type": kind, **found}


def _numbers(schedule: ScheduleConfig) -> str | None:
    kind, ahead, every = schedule.type, schedule.max_staleness, schedule.sync_every
    if kind in ("sync", "stream") and ahead:
        return f"max_staleness must be 0 with type {kind}, got {ahead:g}"
    if kind in ("sync", "step_off", "controlled") and every != 1:
        return f"sync_every must be 1 with type {kind}, got {every}; use stream, stale or partial"
    if kind == "stream" and every == 1:
        return "sync_every must be above 1 with type stream, got 1; use type sync"
    if kind in ("stale", "partial") and not ahead:
        return f"max_staleness must be above 0 with type {kind}, got 0; use type stream"
    if kind in ("step_off", "controlled") and ahead != int(ahead):
        return f"max_staleness must be a whole number with type {kind}, got {ahead:g}"
    if kind == "step_off" and not ahead:
        return "max_staleness must be at least 1 with type step_off, got 0; use type sync"
    return None


def _policy(schedule: ScheduleConfig) -> str | None:
    kind, policy = schedule.type, schedule.in_flight
    if kind in ("step_off", "stale") and policy != "keep":
        other = "async" if kind == "step_off" else "partial"
        return f"in_flight must be keep with type {kind}, got {policy}; use type {other}"
    if kind == "partial" and policy == "keep":
        return "in_flight must be in_place or abort with type partial, got keep; use type stale"
    return None


def _held(schedule: ScheduleConfig) -> str | None:
    kind, hold, most = schedule.type, schedule.held, schedule.max_staleness * schedule.sync_every
    if kind == "controlled" and not schedule.drawn and hold != schedule.max_staleness:
        return f"hold_batches must be max_staleness with type controlled, got {hold}; leave it out"
    if kind not in ("async", "controlled") and hold:
        return f"hold_batches must be 0 with type {kind}, got {hold}; use type async or controlled"
    if hold > math.floor(most):
        return (
            f"hold_batches must be <= max_staleness * sync_every = {most:g}, which limits how many "
            f"samples are scored ahead, got {hold}"
        )
    return None


def _drawn(schedule: ScheduleConfig) -> str | None:
    kind, delays = schedule.type, schedule.delays
    if not schedule.drawn:
        return None
    if kind != "controlled":
        return f"delays.type must be none with type {kind}, got {delays.type}; use type controlled"
    if schedule.hold_batches is not None:
        return (
            "hold_batches must be null with delays, which say how long each batch is held, got "
            f"{schedule.hold_batches}; leave it out"
        )
    if not delays.high_s:
        return "delays.high_s must be > 0, as max_staleness updates stand for it, got 0"
    if delays.time_scale != 1:
        return (
            "delays.time_scale must be 1, as max_staleness updates stand for delays.high_s, got "
            f"{delays.time_scale:g}; leave it out"
        )
    return None


def _order(schedule: ScheduleConfig) -> str | None:
    if schedule.order == "completion":
        if schedule.held or schedule.drawn:
            what = "delays, which say" if schedule.drawn else "hold_batches, which fixes"
            return (
                f"order must be admission with {what} the staleness of each batch, got completion"
            )
        return None
    if schedule.max_age is not None:
        return f"max_age must be null with order admission, got {schedule.max_age}; leave it out"
    return None
