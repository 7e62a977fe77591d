"""Defines what the learner's side of the sites is told when a run starts."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import ControllerState


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Says how sites are treated.

    slots: prompts that each may hold at once. updates: of the whole run. run: names this start of
    the learner's process, or from a checkpoint in it. lost_after_s, quarantine_after: see the
    section sites.
    """

    slots: Mapping[str, int]
    updates: int
    run: str
    lost_after_s: float
    quarantine_after: int

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return how a run treats its sites, with a new name for this start."""
        sites = config.sites
        return cls(
            slots=config.site_slots,
            updates=config.run.max_steps,
            run=uuid.uuid4().hex,
            lost_after_s=sites.lost_after_s,
            quarantine_after=sites.quarantine_after,
        )


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Says how prompts are given to sites, and which samples are taken.

    scores: whether each site asks the teachers itself. group_size: G. max_delay_s: see
    sites.max_delay_s. bound: most updates that a sample may be behind. version: that the run begins
    with. resumed: prompts that a resumed run still wants; next_uid: it wants all from this one on.
    """

    scores: Mapping[str, bool]
    group_size: int
    max_delay_s: float
    bound: int
    version: int = 0
    resumed: Collection[int] = ()
    next_uid: int = 0

    @classmethod
    def of(cls, config: Config, state: ControllerState) -> Self:
        """Return those of a run. state: of the controller that it continues."""
        return cls(
            scores={name: site.scores for name, site in config.sites.members.items()},
            group_size=config.rollout.group_size,
            max_delay_s=config.sites.max_delay_s,
            bound=config.staleness_bound,
            version=state.version,
            resumed=frozenset(each.uid for each in state.line if each.prompt is not None),
            next_uid=state.next_uid,
        )
