"""Says in one line what a schedule does, in this project's words and in those of others."""

from __future__ import annotations

from megatron_opd.config.schedule import ScheduleConfig

POLICIES = {
    "in_place": "responses in flight go on with new weights",
    "keep": "a weight sync waits for responses in flight",
    "abort": "a weight sync throws away responses in flight",
}


def schedule_in_words(schedule: ScheduleConfig, batch_size: int) -> str:
    """Return how far sampling may run ahead, and what that bounds."""
    permits, bound = schedule.permits(batch_size), schedule.bound(batch_size)
    held = f", trained on {schedule.held} batches later" if schedule.held else ""
    if schedule.drawn:
        held = f", how much later is drawn for each batch ({schedule.delays.type})"
    return (
        f"{schedule.type}: tokens at most {_count(bound, 'update')} old, by {permits} permits = "
        f"(1 + {schedule.max_staleness:g}) * {schedule.sync_every} * {batch_size}; a weight sync "
        f"every {_count(schedule.sync_every, 'update')}; {POLICIES[schedule.in_flight]}; order of "
        f"{schedule.order}{held}"
    )


def open_in_words(window: int, slots: int, sync_every: int) -> str:
    """Return what open admission bounds (sites.admission)."""
    return (
        f"open admission: tokens at most {_count(window, 'update')} old, older samples are dropped "
        f"(too_stale); {slots} prompts at the sites at once; a batch is what arrived first; a "
        f"weight sync every {_count(sync_every, 'update')}"
    )


def in_verls_words(schedule: ScheduleConfig) -> str:
    """Return the keys of verl's fully asynchronous trainer, and AsyncOPD's tau, that are this."""
    if schedule.drawn:
        return "nothing in verl is like it (delays)"
    if schedule.held or schedule.order == "completion" or schedule.in_flight == "abort":
        other = "hold_batches" if schedule.held else schedule.order
        other = "in_flight: abort" if schedule.in_flight == "abort" else other
        return f"nothing in verl is like it ({other})"
    partial = schedule.in_flight == "in_place" and schedule.max_staleness > 0
    tau = (
        f"; AsyncOPD's tau = {schedule.max_staleness:g}"
        if schedule.sync_every == 1 and schedule.max_staleness == int(schedule.max_staleness)
        else ""
    )
    return (
        f"trigger_parameter_sync_step {schedule.sync_every}, staleness_threshold "
        f"{schedule.max_staleness:g}, partial_rollout {str(partial).lower()}{tau}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
