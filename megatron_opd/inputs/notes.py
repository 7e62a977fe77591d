"""Notes what a configuration allows but probably does not mean, for `opd check` and for a run."""

from __future__ import annotations

from megatron_opd.config.defaults import bounds, quantised_by
from megatron_opd.config.objectives import Grpo, Ppo
from megatron_opd.config.schema import Config
from megatron_opd.config.tree import key_of_teacher
from megatron_opd.errors import UserError
from megatron_opd.inputs.extra_args import settings_of
from megatron_opd.metrics.mismatch_limits import why_not
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sizing.matching import Served, differences
from sglang_bridge.protocol import ServerInfo


def notes(config: Config) -> list[str]:
    """Return one line for each such setting."""
    found = (
        bounds(config),
        _ppo_is(config),
        _teacher(config),
        _overlap(config),
        _aborting(config),
        _mismatch(config),
    )
    return [line for line in found if line is not None]


def sampler_gaps(config: Config, spec: ModelSpec) -> list[str]:
    """Return one line for each difference of learner and sampler that widens their gap.

    UserError: weight_sync.match allows none. Servers started elsewhere say how they divide the
    model once they are asked, see served_gaps.
    """
    lines = _allowed(config, differences(config, spec))
    if config.student.urls and config.weight_sync.match == "require":
        lines.append(
            "weight_sync.match require: the tp and ep of student.urls are compared with the "
            "learner's when the servers are asked, as a run starts"
        )
    return lines


def served_gaps(config: Config, spec: ModelSpec, info: ServerInfo) -> list[str]:
    """Return one line for each difference of the learner and a student server, by its own words.

    UserError: weight_sync.match allows none.
    """
    return _allowed(config, differences(config, spec, served_by(info)))


def served_by(info: ServerInfo) -> Served:
    """Return how a server that was asked computes the model."""
    return Served(info.tp_size, info.ep_size, info.dtype, info.url)


def _allowed(config: Config, found: list[str]) -> list[str]:
    """Return notes of these differences. UserError: weight_sync.match allows none."""
    match = config.weight_sync.match
    if match == "off":
        return []
    if found and match == "require":
        raise UserError(
            f"weight_sync.match=require needs a learner and servers of one layout, got {found[0]}"
        )
    return [f"wider gap between learner and sampler: {line}" for line in found]


def _ppo_is(config: Config) -> str | None:
    """Return a line on PPO-IS with a quantised sampler, which docs/findings.md saw collapse."""
    quantised = quantised_by(config)
    clipped = [o.type for o in config.estimator.objectives if isinstance(o, Grpo | Ppo)]
    if (
        quantised is None
        or not clipped
        or not config.estimator.applied_correction.keeps_whole_ratio
    ):
        return None
    how = " ".join(quantised)
    return (
        f"correction: {clipped[0]} with the whole ratio of learner to sampler is PPO-IS, which "
        f"lost most of its accuracy where a quantised sampler's gap was wide ({how} here; it "
        "showed nothing with fp8 on a small model, docs/findings.md); use correction.type "
        "truncated with max_ratio 2 and prox true"
    )


def _overlap(config: Config) -> str | None:
    schedule = config.schedule
    spare = schedule.permits(config.buffer.batch_size) // config.buffer.batch_size
    if not config.weight_sync.overlap or schedule.held + schedule.sync_every < spare:
        return None
    return (
        "weight_sync.overlap has no effect: with schedule.max_staleness "
        f"{schedule.max_staleness:g}, schedule.sync_every {schedule.sync_every} and "
        f"schedule.hold_batches {schedule.held} no batch is ready before the weight sync is done; "
        "raise schedule.max_staleness, lower schedule.hold_batches, or set overlap: false"
    )


def _mismatch(config: Config) -> str | None:
    why = None if config.learner.mismatch_limit == "off" else why_not(config, settings_of(config))
    return why and f"learner.mismatch_limit {config.learner.mismatch_limit} has no effect: {why}"


def _aborting(config: Config) -> str | None:
    if config.schedule.in_flight != "abort":
        return None
    if config.rollout.seeded:
        return (
            "schedule.in_flight abort throws long responses away more often; they are sampled anew "
            "by the same random numbers, which favours short ones only as far as newer weights "
            "sample other tokens (docs/schedules.md); in_place and keep never do"
        )
    return (
        "schedule.in_flight abort with rollout.seeded false favours short responses: long ones are "
        "thrown away more often and sampled afresh; use rollout.seeded true, in_place or keep"
    )


def _teacher(config: Config) -> str | None:
    unread = [name for name in config.all_teachers if name != config.user_teacher]
    if not unread or config.estimator.asks_teacher:
        return None
    keys = ", ".join(map(key_of_teacher, unread))
    return (
        f"{keys} has no effect: objective.type {config.objective.type} reads no teacher, so no "
        "server is started for it"
    )
