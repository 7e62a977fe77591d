"""The gradients and weights of an update, over all ranks that hold the same parameters.

Megatron's distributed optimizer sums and updates each rank's own part alone; which part that is
follows from the order of parameters, and that differs between kinds of layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.state.optimizer import OptimizerShare, shares_of
from megatron_opd.models.shards import local_shards


def results_of(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """Return gradients and the optimizer's float32 weights by names of the tensors they belong to.

    Collective over the copies of each parameter.
    """
    shares = {id(share.parameter): share for share in shares_of(learner.optimizer, loading=False)}
    found: dict[str, torch.Tensor] = {}
    for shard in local_shards(learner.model, learner.spec, learner.world).values():
        parameter: Any = shard.parameter
        gradient, weight = (
            torch.zeros_like(parameter.main_grad),
            torch.zeros_like(parameter).float(),
        )
        if id(parameter) in shares:  # this rank updates some of it
            share = shares[id(parameter)]
            own = slice(share.start, share.stop)
            gradient.view(-1)[own] = parameter.main_grad.view(-1)[own]
            weight.view(-1)[own] = _main_weight(share)
        for kind, part in (("gradients", gradient), ("weights", weight)):
            dist.all_reduce(part, group=_copies(parameter))
            found[f"{kind}: {' '.join(shard.names)}"] = part.detach()
    return found


def _main_weight(share: OptimizerShare) -> torch.Tensor:
    value = share.values["param"]
    if value.dtype != torch.int16:
        return value
    return joined(share.parameter.detach().view(-1)[share.start : share.stop], value)


def joined(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers from bfloat16 ones and the lower 16 bits, as TransformerEngine does.

    A weight is rounded, so where the lower bits are a negative number it is one too large.
    """
    high = weight.view(torch.int16).int() - (low < 0).int()
    return ((high << 16) | (low.int() & 0xFFFF)).view(torch.float32)


def _copies(parameter: torch.Tensor) -> Any:
    if getattr(parameter, "allreduce", True):
        return ps.get_data_parallel_group(with_context_parallel=True)
    return ps.get_expert_data_parallel_group()
