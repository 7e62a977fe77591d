"""Summarises the rewards of the responses trained on, and how much groups differ.

A group whose rewards are all equal gives advantages of 0: it costs a rollout and teaches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_opd.config.objective import Credit
from megatron_opd.metrics.types import Mean
from megatron_opd.records.turn_rewards import largest_difference, turn_rewards
from megatron_opd.records.types import AnySample, Batch


class RewardStats:
    """Averages rewards over the batches added; None where there is nothing to average.

    Args:
        group_size: G; the group of a sample is its uid // G. 1: no groups, no group figures.
        credit: whose rewards are compared: of trajectories, or of turns at the same position.
    """

    def __init__(self, group_size: int = 1, credit: Credit = "trajectory") -> None:
        self._group_size, self._credit = group_size, credit
        self._reward, self._group_std, self._uniform = Mean(), Mean(), Mean()
        self._penalty = Mean()

    def add(self, batch: Batch) -> None:
        """Count every sample of `batch` that has a reward; a group only if it learns from them."""
        groups: defaultdict[int, list[AnySample]] = defaultdict(list)
        for sample in batch.samples:
            if sample.reward is None:
                continue
            self._reward.add(sample.reward)
            self._penalty.add(sample.overlong_penalty)
            if sample.rollout.prompt.reward_weight > 0:
                groups[sample.rollout.prompt.uid // self._group_size].append(sample)
        if self._group_size > 1:
            for members in groups.values():
                rewards = [each.reward for each in members if each.reward is not None]
                self._group_std.add(float(np.std(rewards)))
                self._uniform.add(self._is_uniform(members, rewards))

    def _is_uniform(self, members: Sequence[AnySample], rewards: Sequence[float]) -> bool:
        if self._credit == "turn":
            return largest_difference([turn_rewards(sample) for sample in members]) == 0
        return min(rewards) == max(rewards)

    @property
    def mean(self) -> float | None:
        """Returns the mean reward."""
        return self._reward.value

    @property
    def overlong_penalty(self) -> float | None:
        """Returns the mean of what length adds to the reward, <= 0."""
        return self._penalty.value

    @property
    def group_std(self) -> float | None:
        """Returns the population deviation inside a group, averaged over groups."""
        return self._group_std.value

    @property
    def uniform_groups(self) -> float | None:
        """Returns the share of groups whose rewards are all equal."""
        return self._uniform.value
