"""Joins what the data-parallel ranks computed of their shares of a batch, on every rank.

Axes: T sampled tokens, of a micro-batch, a share or all shares end to end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_opd.learner.world import World
from megatron_opd.records.columns import RankInputs
from megatron_opd.records.types import FloatArray


def whole_batch(found: Sequence[torch.Tensor], batch: RankInputs, world: World) -> FloatArray:
    """Return float32 [T]: the shares of all data-parallel ranks, each in its sequences' order.

    found: [T] of each micro-batch of this rank's share, in the plan's order; read on the ranks that
    count alone (World.counts), of which each share has one. Collective.
    """
    length = int(batch.response_B.sum())
    lengths = torch.zeros(world.parallel.dp, dtype=torch.int64, device=world.device)
    if world.counts:
        lengths[world.data_rank] = length
    _sum_over(lengths, world)
    ends = lengths.cumsum(0).tolist()
    whole_T = torch.zeros(ends[-1], dtype=torch.float32, device=world.device)
    if world.counts:
        start = ends[world.data_rank] - length
        place_T = torch.as_tensor(start + share_order(batch), device=world.device)
        whole_T[place_T] = torch.cat(list(found)).float()
    _sum_over(whole_T, world)  # every other rank adds zero
    return whole_T.cpu().numpy()


def share_order(batch: RankInputs) -> np.ndarray:
    """Return int64 [T]: where each token of the micro-batches, end to end, stands in its share."""
    end_B = np.cumsum(batch.response_B)
    sequences = [index for micro in batch.plan[0] for index in micro]
    return np.concatenate([np.arange(end_B[b] - batch.response_B[b], end_B[b]) for b in sequences])


def _sum_over(values: torch.Tensor, world: World) -> None:
    if world.size > 1:
        dist.all_reduce(values)
