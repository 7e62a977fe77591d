"""Derives from the configuration how much sampler sites hold, and how stale samples get."""

from __future__ import annotations

from megatron_opd.config.tree import ConfigTree


def slots_by_site(config: ConfigTree) -> dict[str, int]:
    """Return how many prompts each site holds at once."""
    default = config.rollout.concurrency
    return {
        name: default if site.concurrency is None else site.concurrency
        for name, site in config.sites.members.items()
    }


def is_open(config: ConfigTree) -> bool:
    """Return whether sites always have all their slots full (open admission)."""
    return bool(config.sites.members) and config.sites.admission == "open"


def staleness_bound(config: ConfigTree) -> int:
    """Return the bound on the staleness of a token that is trained on, in updates."""
    if is_open(config):
        return config.sites.max_staleness
    return config.schedule.bound(config.buffer.batch_size)


def permits(config: ConfigTree) -> int:
    """Return how many prompts may be between their admission and the version they led to."""
    batch_size = config.buffer.batch_size
    if not is_open(config):
        return config.schedule.permits(batch_size)
    slots, group = sum(slots_by_site(config).values()), config.rollout.group_size
    return open_permits(
        batch_size, group, slots, config.sites.max_staleness, config.schedule.sync_every
    )


def open_permits(batch_size: int, group: int, slots: int, window: int, sync_every: int) -> int:
    """Return the permits of open admission (docs/staleness.md): enough never to stop a site early.

    They are those of groups of which a site has a member, of the batches that wait and are in the
    window, and of those since the last weight sync.
    """
    return (slots + 1) * group + (window + 1 + sync_every) * batch_size
