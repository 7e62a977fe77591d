"""Computes advantages of turns from their own rewards (environment.credit: turn). Torch-free.

Invariant: the advantage of a turn is a function of the rewards of the turns at its own position in
its group's trajectories, so that no reward acts on an earlier turn, nor on a later one. A turn
without a reward has an advantage of 0 and is in no statistics; one that is alone at its position is
as a response that is alone in its group (batching/advantages.py).

Axes: R the sampled runs of a batch, each of which is a turn; sample by sequence in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_opd.batching.advantages import ADVANTAGES, Index
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objective import RewardAdvantage
from megatron_opd.records.columns import DoubleArray
from megatron_opd.records.types import AnySample


def turn_advantages(
    estimator: Estimator, samples: Sequence[AnySample], group_size: int
) -> list[DoubleArray] | None:
    """Return the advantages of every sequence's runs; None where credit is of the trajectory.

    A sample's group is its uid // group_size.
    """
    rewarded = [each for each in estimator.objectives if each.reward_advantage is not None]
    kind = rewarded[0].reward_advantage if rewarded else None
    if estimator.credit == "trajectory" or kind is None:
        return None
    rollouts = [sample.rollout for sample in samples]
    runs = [(rollout, run) for rollout in rollouts for run in rollout.runs]
    group_R = np.array([each.prompt.uid // group_size for each, _ in runs])
    turn_R = np.array([run.turn for _, run in runs])
    rewards = [each.turns[run.turn].reward for each, run in runs]
    reward_R = np.array([np.nan if reward is None else reward for reward in rewards])
    advantage_R = advantages_by_position(kind, reward_R, group_R, turn_R)
    counts = [
        sum(run.sequence == sequence for run in rollout.runs)
        for rollout in rollouts
        for sequence in range(len(rollout.sizes))
    ]
    return np.split(advantage_R, np.cumsum(counts)[:-1])


def advantages_by_position(
    kind: RewardAdvantage, reward_R: DoubleArray, group_R: Index, turn_R: Index
) -> DoubleArray:
    """Return the advantages of turns. reward_R: NaN where there is none. turn_R: positions."""
    advantage_R = np.zeros(len(reward_R))
    compared_R = ~np.isnan(reward_R)
    if compared_R.any():
        places_R2 = np.stack([group_R, turn_R], axis=1)[compared_R]
        _, place_R = np.unique(places_R2, axis=0, return_inverse=True)
        advantage_R[compared_R] = ADVANTAGES[kind](reward_R[compared_R], place_R)
    return advantage_R
