"""Cuts a batch into one share per data-parallel rank, with the columns that samples decide.

A share holds sequences: those of one sample may be on different ranks. Values that depend on a
whole sample or group (advantages) are computed before the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from megatron_opd.batching.advantages import group_columns, no_groups, rows_of
from megatron_opd.batching.plan import BatchPlan, learner_plan
from megatron_opd.batching.rank_batch import rank_batch
from megatron_opd.batching.turn_advantages import turn_advantages
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.records.columns import DoubleArray, GroupColumns, RankBatch, RankPlan
from megatron_opd.records.sequences import by_sequence
from megatron_opd.records.types import (
    AnySample,
    Batch,
    FloatArray,
    Sample,
    SequenceSize,
    sample_here,
)


@dataclass(frozen=True, slots=True)
class SampleSequence:
    """Names one sequence of a sample."""

    sample: AnySample
    sequence: int = 0

    @property
    def size(self) -> SequenceSize:
        """Returns how large it is."""
        return self.sample.rollout.sizes[self.sequence]

    def alone(self) -> Sample:
        """Return a sample of this sequence. TypeError: a data worker holds its arrays."""
        return by_sequence(sample_here(self.sample))[self.sequence]


def sequences_of(samples: Sequence[AnySample]) -> list[SampleSequence]:
    """Return the sequences of samples, in order."""
    return [
        SampleSequence(sample, number)
        for sample in samples
        for number in range(len(sample.rollout.sizes))
    ]


@dataclass(frozen=True, slots=True)
class Share:
    """Holds what one data-parallel rank gets of a batch; plan indexes into its sequences.

    groups: the rows of these sequences. version: the learner's when it trains. advantage_R: of the
    runs of these sequences; None where advantages are of whole trajectories.
    """

    update: int
    version: int
    plan: RankPlan
    sequences: tuple[SampleSequence, ...]
    groups: GroupColumns[DoubleArray]
    advantage_R: DoubleArray | None = None

    def columns(self) -> RankBatch:
        """Return the columns of the sequences, end to end. ValueError: a sample is malformed."""
        samples = [each.alone() for each in self.sequences]
        groups, turns = self.groups, self.advantage_R
        return rank_batch(self.update, self.version, samples, self.plan, groups, turns)


def shares(
    batch: Batch, config: LearnerConfig, estimator: Estimator, group_size: int
) -> list[Share]:
    """Return the shares in the order of the data-parallel ranks, which number their sequences anew.

    ValueError: see plan_batch.
    """
    plan = learner_plan([_lengths(sample) for sample in batch.samples], config)
    groups = group_columns(estimator, batch.samples, group_size)
    turns = turn_advantages(estimator, batch.samples, group_size)
    sequences = sequences_of(batch.samples)
    found: list[Share] = []
    for rank in range(config.parallel.dp):
        held = held_sequences(plan, rank)
        own = tuple(sequences[i] for i in held)
        rows = rows_of(groups, held)
        own_R = None if turns is None else np.concatenate([turns[i] for i in held])
        found.append(Share(batch.update, batch.version, rank_plan(plan, rank), own, rows, own_R))
    return found


def _lengths(sample: AnySample) -> list[int]:
    return [size.tokens for size in sample.rollout.sizes]


def held_sequences(plan: BatchPlan, rank: int) -> list[int]:
    """Return the sequences of a data-parallel rank, in the order of its share."""
    return sorted(i for mini in plan for micro in mini[rank] for i in micro)


def rank_plan(plan: BatchPlan, rank: int) -> list[list[list[int]]]:
    """Return the plan of one rank, with the numbers that its share gives its sequences."""
    position = {index: number for number, index in enumerate(held_sequences(plan, rank))}
    return [[[position[i] for i in micro] for micro in mini[rank]] for mini in plan]


@dataclass(frozen=True, slots=True)
class ScoringShares:
    """Holds the shares of samples that are only scored.

    order: which sequence stands where, share by share; the first of equal numbers counts, as
    samples are repeated where there are too few for the ranks. sequences: of each sample.
    """

    shares: list[Share]
    order: list[int]
    sequences: list[int]

    def by_sample(self, logp_T: FloatArray) -> list[FloatArray]:
        """Cut the log-probs of all shares, end to end, into those of each sample.

        ValueError: their number is another.
        """
        lengths = [each.size.sampled for share in self.shares for each in share.sequences]
        if len(logp_T) != sum(lengths):
            raise ValueError(f"{sum(lengths)} tokens were to be scored, got {len(logp_T)}")
        parts = np.split(logp_T, np.cumsum(lengths)[:-1])
        found = dict(zip(reversed(self.order), reversed(parts), strict=True))
        of_sequences = (found[index] for index in sorted(found))
        return [np.concatenate(list(islice(of_sequences, count))) for count in self.sequences]


def scoring_shares(samples: Sequence[Sample], version: int, config: LearnerConfig) -> ScoringShares:
    """Return what the ranks need to score samples in one mini-batch, planned as for training."""
    wanted = max(len(samples), config.parallel.least_samples)
    index = list(islice(cycle(range(len(samples))), wanted))
    lengths = [_lengths(samples[i]) for i in index]
    plan = learner_plan(lengths, config.model_copy(update={"num_mini_batches": 1}))
    sequences = sequences_of(samples)
    first = np.cumsum([0, *(len(_lengths(sample)) for sample in samples)])
    numbers = [n for i in index for n in range(first[i], first[i + 1])]
    found: list[Share] = []
    order: list[int] = []
    for rank in range(config.parallel.dp):
        held = [numbers[place] for place in held_sequences(plan, rank)]
        order += held
        own = tuple(sequences[i] for i in held)
        found.append(Share(0, version, rank_plan(plan, rank), own, no_groups(len(held))))
    return ScoringShares(found, order, np.diff(first).tolist())
