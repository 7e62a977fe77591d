"""Checks the rules on sampler sites that involve several sections; see rules.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_opd.config.cluster import LAUNCHED
from megatron_opd.config.schedule import ScheduleConfig
from megatron_opd.config.sites import LEARNER_KEYS, SitesConfig
from megatron_opd.config.tree import ConfigTree
from sglang_bridge.listening import EVERY_ADDRESS

Rule = Callable[[ConfigTree], str | None]


def _without_members(config: ConfigTree) -> str | None:
    if config.sites.members or config.sites == SitesConfig():
        return None
    return "sites has no effect without sites.members; name the sites there, or leave sites out"


def _refused_beside(config: ConfigTree) -> str | None:
    """Refuse what a run with sites does not do, one key after another."""
    if not config.sites.members:
        return None
    for key, found, wanted, why in _beside(config):
        if found != wanted:
            return f"{key} must be {_text(wanted)} with sites.members, {why}, got {_text(found)}"
    return None


def _beside(config: ConfigTree) -> list[tuple[str, Any, Any, str]]:
    """Return (key, value, what it must be, why)."""
    no_servers = "where no student server is part of the run to be evaluated"
    return [
        (
            "weight_sync.type",
            config.weight_sync.type,
            "disk",
            "which pull versions of the weights from disk",
        ),
        ("student.urls", list(config.student.urls), [], "which start servers of their own"),
        ("workers.count", config.workers.count, 0, "whose samples arrive at the controller whole"),
        (
            "schedule.time_shared",
            config.schedule.time_shared,
            False,
            "whose servers are on other machines than the learner",
        ),
        ("run.deterministic", config.run.deterministic, False, "where timing decides who samples"),
        (
            "cluster.fleet_file",
            config.cluster.fleet_file,
            None,
            "which come and go by themselves",
        ),
        ("evaluation.problems", config.evaluation.problems, 0, f"{no_servers}; use opd eval"),
        ("evaluation.servers", config.evaluation.servers, 0, no_servers),
        ("metrics.health_every", config.metrics.health_every, 0, no_servers),
        ("metrics.leak_every", config.metrics.leak_every, 0, no_servers),
        (
            "simulation.failures",
            config.simulation.failures,
            None,
            "whose servers' failures are not simulated",
        ),
    ]


def _places(config: ConfigTree) -> str | None:
    if not config.sites.members:
        return None
    kind = config.cluster.type
    if kind in LAUNCHED:
        return (
            f"cluster.type must be local or external with sites.members, got {kind}; start the "
            "learner's site where its machine is known to the sites"
        )
    if config.sites.host in EVERY_ADDRESS:
        return (
            "sites.host must be an address at which sites reach the learner's site, which is in "
            f"their keys, got {config.sites.host} (every address); name the one that they share"
        )
    if LEARNER_KEYS in config.sites.members:
        return (
            "sites.members must not have the name 'learner', whose file of keys is the learner's; "
            "rename the site"
        )
    if config.sites.port in (config.learner.listen_port, *config.student.ports):
        return (
            "sites.port must not be the port of the learner or of a server, got "
            f"{config.sites.port}; choose another"
        )
    return None


def _slots(config: ConfigTree) -> str | None:
    group = config.rollout.group_size
    for name, slots in config.site_slots.items():
        if slots < group:
            return (
                f"sites.members.{name}.concurrency must be >= rollout.group_size, because a group "
                f"goes to one site, got {slots} and {group}"
            )
    return None


def _link(config: ConfigTree) -> str | None:
    link = config.sites.link
    if link.heartbeat_s * 2 > link.silence_s:
        return (
            "sites.link.silence_s must be >= 2 * sites.link.heartbeat_s, or one heartbeat that is "
            f"late breaks the link, got {link.silence_s:g} and {link.heartbeat_s:g}"
        )
    if link.chunk_bytes > link.outbox_bytes:
        return (
            "sites.link.chunk_bytes must be <= sites.link.outbox_bytes, got "
            f"{link.chunk_bytes} and {link.outbox_bytes}"
        )
    return None


def _scores(config: ConfigTree) -> str | None:
    for name, site in config.sites.members.items():
        if not site.scores and not config.estimator.reads_teacher:
            return (
                f"sites.members.{name}.scores must be true with objective.type "
                f"{config.objective.type}, which reads no teacher, got false; leave it out"
            )
    return None


def _open(config: ConfigTree) -> str | None:
    sites, schedule, natural = config.sites, config.schedule, ScheduleConfig()
    if not sites.members:
        return None
    if not sites.is_open:
        window = SitesConfig().max_staleness
        if sites.max_staleness == window:
            return None
        return (
            "sites.max_staleness has no effect with sites.admission permits, whose bound is the "
            f"schedule's, got {sites.max_staleness}; leave it out, or set sites.admission open"
        )
    for key in ("type", "max_staleness", "hold_batches", "order", "max_age"):
        found = getattr(schedule, key)
        if found != getattr(natural, key):
            return (
                f"schedule.{key} has no effect with sites.admission open, where slots admit "
                f"prompts and batches are what arrived first, got {_text(found)}; leave it out, or "
                "set sites.admission permits"
            )
    if sites.max_staleness < schedule.sync_every - 1:
        return (
            "sites.max_staleness must be >= schedule.sync_every - 1, or the last updates before a "
            f"weight sync find no sample, got {sites.max_staleness} and {schedule.sync_every}"
        )
    return None


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return str(value)


SITE_RULES: tuple[Rule, ...] = (
    _without_members,
    _refused_beside,
    _places,
    _slots,
    _link,
    _scores,
    _open,
)
