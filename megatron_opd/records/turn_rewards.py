"""Compares the rewards of a group's turns, position by position (environment.credit: turn)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from megatron_opd.records.types import AnySample

TurnRewards = tuple[float | None, ...]
"""The reward of each turn of a trajectory; None: it has none."""


def turn_rewards(sample: AnySample) -> TurnRewards:
    """Return the rewards that the environment gave."""
    return tuple(turn.reward for turn in sample.rollout.turns)


def largest_difference(group: Sequence[TurnRewards]) -> float:
    """Return the largest difference between two rewards at one position, 0 where none differ."""
    positions = zip_longest(*group)
    known = [[reward for reward in position if reward is not None] for position in positions]
    return max((max(rewards) - min(rewards) for rewards in known if rewards), default=0.0)
