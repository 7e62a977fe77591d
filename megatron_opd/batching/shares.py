"""Cuts a batch into one share per data-parallel rank, with the columns its groups decide.

Values that depend on a whole group (advantages) are computed before the cut, because a group's
members may go to different ranks.
"""

from __future__ import annotations

from megatron_opd.batching.advantages import group_columns, rows_of
from megatron_opd.batching.plan import learner_plan
from megatron_opd.batching.rank_batch import rank_batch
from megatron_opd.columns import RankBatch
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.types import Batch


def shares(
    batch: Batch, config: LearnerConfig, estimator: Estimator, group_size: int
) -> list[RankBatch]:
    """Return the shares in the order of the data-parallel ranks; each numbers its samples from 0.

    ValueError: the batch cannot be shared out equally, or a sample is malformed.
    """
    plan = learner_plan([sample.rollout.num_tokens for sample in batch.samples], config)
    groups = group_columns(estimator, batch.samples, group_size)
    found: list[RankBatch] = []
    for rank in range(config.parallel.dp):
        held = sorted(i for mini in plan for micro in mini[rank] for i in micro)
        position = {index: number for number, index in enumerate(held)}
        own = [[[position[i] for i in micro] for micro in mini[rank]] for mini in plan]
        samples = [batch.samples[i] for i in held]
        found.append(rank_batch(batch.update, batch.version, samples, own, rows_of(groups, held)))
    return found
