"""Cuts a batch into one share per data-parallel rank, with the columns its groups decide.

Values that depend on a whole group (advantages) are computed before the cut, because a group's
members may go to different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from megatron_opd.batching.advantages import group_columns, no_groups, rows_of
from megatron_opd.batching.plan import BatchPlan, learner_plan
from megatron_opd.batching.rank_batch import rank_batch
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.records.columns import DoubleArray, GroupColumns, RankBatch, RankPlan
from megatron_opd.records.types import AnySample, Batch, FloatArray, Sample, sample_here


@dataclass(frozen=True, slots=True)
class Share:
    """Holds what one data-parallel rank gets of a batch; plan indexes into its samples.

    groups: the rows of these samples. version: the learner's when it trains.
    """

    update: int
    version: int
    plan: RankPlan
    samples: tuple[AnySample, ...]
    groups: GroupColumns[DoubleArray]

    def columns(self) -> RankBatch:
        """Return the columns of the samples, end to end. ValueError: a sample is malformed."""
        samples = [sample_here(sample) for sample in self.samples]
        return rank_batch(self.update, self.version, samples, self.plan, self.groups)


def shares(
    batch: Batch, config: LearnerConfig, estimator: Estimator, group_size: int
) -> list[Share]:
    """Return the shares in the order of the data-parallel ranks; each numbers its samples from 0.

    ValueError: see plan_batch.
    """
    plan = learner_plan([sample.rollout.num_tokens for sample in batch.samples], config)
    groups = group_columns(estimator, batch.samples, group_size)
    found: list[Share] = []
    for rank in range(config.parallel.dp):
        held = held_samples(plan, rank)
        samples = tuple(batch.samples[i] for i in held)
        own = rank_plan(plan, rank)
        found.append(Share(batch.update, batch.version, own, samples, rows_of(groups, held)))
    return found


def held_samples(plan: BatchPlan, rank: int) -> list[int]:
    """Return the samples of a data-parallel rank, in the order of its share."""
    return sorted(i for mini in plan for micro in mini[rank] for i in micro)


def rank_plan(plan: BatchPlan, rank: int) -> list[list[list[int]]]:
    """Return the plan of one rank, with the numbers that its share gives its samples."""
    position = {index: number for number, index in enumerate(held_samples(plan, rank))}
    return [[[position[i] for i in micro] for micro in mini[rank]] for mini in plan]


@dataclass(frozen=True, slots=True)
class ScoringShares:
    """Holds the shares of samples that are only scored.

    order: which sample stands where, share by share; the first of equal numbers counts, as samples
    are repeated where there are too few for the ranks.
    """

    shares: list[Share]
    order: list[int]

    def by_sample(self, logp_T: FloatArray) -> list[FloatArray]:
        """Cut the log-probs of all shares, end to end, into those of each sample.

        ValueError: their number is another.
        """
        lengths = [s.rollout.num_response_tokens for share in self.shares for s in share.samples]
        if len(logp_T) != sum(lengths):
            raise ValueError(f"{sum(lengths)} tokens were to be scored, got {len(logp_T)}")
        parts = np.split(logp_T, np.cumsum(lengths)[:-1])
        found = dict(zip(reversed(self.order), reversed(parts), strict=True))
        return [found[index] for index in sorted(found)]


def scoring_shares(samples: Sequence[Sample], version: int, config: LearnerConfig) -> ScoringShares:
    """Return what the ranks need to score samples in one mini-batch, planned as for training."""
    wanted = max(len(samples), config.parallel.least_samples)
    index = list(islice(cycle(range(len(samples))), wanted))
    lengths = [samples[i].rollout.num_tokens for i in index]
    plan = learner_plan(lengths, config.model_copy(update={"num_mini_batches": 1}))
    found: list[Share] = []
    order: list[int] = []
    for rank in range(config.parallel.dp):
        held = [index[place] for place in held_samples(plan, rank)]
        order += held
        own = rank_plan(plan, rank)
        own_samples = tuple(samples[i] for i in held)
        found.append(Share(0, version, own, own_samples, no_groups(len(held))))
    return ScoringShares(found, order)
