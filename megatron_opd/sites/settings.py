"""Defines what the learner's side of the sites is told when a run starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """Says how samples are taken.

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


@dataclass(frozen=True, slots=True)
class ExpectedSite:
    """Says what a site must have like its learner's site; see messages.Hello."""

    digests: Mapping[str, str]
    model: int
    tokenizer: int
    vocab_size: int
    ends: Sequence[int]
    max_clock_skew_s: float
