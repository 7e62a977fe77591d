"""The gradients of an update over all ranks that hold the same parameters.

Megatron's distributed optimizer sums each rank's own part alone; which part that is follows from
the order of parameters, and that differs between kinds of layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.models.shards import local_shards


def whole_gradients(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """Return by names of the tensors in a parameter its gradient. Collective over its copies."""
    found: dict[str, torch.Tensor] = {}
    for shard in local_shards(learner.model, learner.spec, learner.world).values():
        parameter: Any = shard.parameter
        part = torch.zeros_like(parameter.main_grad)
        for start, end in _own_ranges(learner.optimizer, parameter):
            part.view(-1)[start:end] = parameter.main_grad.view(-1)[start:end]
        dense = getattr(parameter, "allreduce", True)
        group = (
            ps.get_data_parallel_group(with_context_parallel=True)
            if dense
            else ps.get_expert_data_parallel_group()
        )
        dist.all_reduce(part, group=group)
        found[" ".join(shard.names)] = part
    return found


def _own_ranges(optimizer: Any, parameter: torch.Tensor) -> list[tuple[int, int]]:
    """Indices of a parameter that this rank's optimizers update."""
    each = getattr(optimizer, "chained_optimizers", [optimizer])
    owners = [one for one in each if parameter in one.model_param_gbuf_map]
    ranges = [one._get_model_param_range_map(parameter)["param"] for one in owners]
    return [(one.start, one.end) for one in ranges]
