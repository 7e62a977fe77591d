"""Presents the learner's float32 optimizer as sharded tensors, whatever the layout.

Invariant: every rank writes and reads its own share of the optimizer, and nothing is gathered. What
is stored belongs to places in whole tensors, so that any other layout finds its own share in it.

Only tensors are kept: main parameters, first and second moments, each in the shape of its model
parameter, and one step count for all. Rates, betas and weight decay follow from the configuration.
So nothing of a checkpoint depends on how many optimizers Megatron chains (two with expert
parallelism, one without), how it groups parameters, or where a data-parallel rank's share of them
ends.

Of Megatron-Core's own formats, fully_reshardable gathers all of it on one rank, dp_reshardable
follows the buckets of one layout, and fully_sharded_model_space is deprecated. With torch's Adam
(no TransformerEngine, no apex) its `state_dict` reads the step of a state that is still empty, and
its `load_state_dict` gives all parameters one shared step tensor, which then counts every
parameter's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_opd.learner.state.boxes import boxes


@dataclass(frozen=True)
class OptimizerShare:
    """Holds this rank's elements start..stop of a flattened parameter, in one optimizer.

    values: by kind (param, exp_avg, exp_avg_sq), flat tensors [stop - start]; the optimizer's own
    memory unless it keeps them in another precision.
    """

    part: DistributedOptimizer
    parameter: torch.nn.Parameter
    start: int
    stop: int
    values: dict[str, torch.Tensor]


def parts_of(optimizer: MegatronOptimizer) -> Sequence[DistributedOptimizer]:
    """Return the chained optimizers that have parameters here."""
    chained: list[Any] = (
        optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    )
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def shares_of(optimizer: MegatronOptimizer, *, loading: bool) -> list[OptimizerShare]:
    """Return what this rank keeps of the optimizer, in a fixed order.

    loading: makes the moments if no step was taken yet; the caller overwrites all of it.
    """
    found: list[OptimizerShare] = []
    for part in parts_of(optimizer):
        if loading and not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()  # pyright: ignore[reportPrivateUsage]
        for parameter, span in _ranges(part):
            values: dict[str, torch.Tensor] = part._get_main_param_and_optimizer_states(parameter)  # pyright: ignore[reportPrivateUsage]
            values = {kind: v.detach() for kind, v in values.items() if kind != "step"}
            found.append(OptimizerShare(part, parameter, span.start, span.end, values))
    return found


def sharded(shares: Sequence[OptimizerShare], model: dict[str, Any]) -> dict[str, Any]:
    """Return sharded tensors whose data are views of the shares' values.

    model: sharded tensors of the model, which say where a parameter lies in its whole tensor.
    """
    bases, _ = extract_sharded_tensors_and_factories(model)
    by_parameter: dict[Any, Any] = {base.data: base for base in nested_values(bases)}
    return {
        str(index): list(_pieces(share, by_parameter[share.parameter]))
        for index, share in enumerate(shares)
    }


def take_over(shares: Sequence[OptimizerShare], step: int) -> None:
    """Let the optimizers continue from the shares' loaded values, after `step` steps."""
    for share in shares:
        # Otherwise the values are its own memory.
        if share.part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            share.part._set_main_param_and_optimizer_states(share.parameter, share.values)  # pyright: ignore[reportPrivateUsage]
    for part in {id(share.part): share.part for share in shares}.values():
        for state in part.optimizer.state.values():
            if "step" in state:
                # One tensor each: torch's Adam adds to it in place.
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), step)
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = step


def step_count(optimizer: MegatronOptimizer) -> int:
    """Return the optimizer steps taken, the same for all parameters."""
    counts: set[int] = set()
    for part in parts_of(optimizer):
        counts |= {int(s["step"]) for s in part.optimizer.state.values() if "step" in s}
        counts |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group}
    assert len(counts) <= 1, f"parameters have taken different numbers of steps: {counts}"
    return counts.pop() if counts else 0


def _ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """Yield the parameters of which this rank updates something, and the flattened range."""
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"]


def _pieces(share: OptimizerShare, base: Any) -> Iterator[ShardedTensor]:
    instance = share.part.distributed_optimizer_instance_id
    for whole, first in _stored_tensors(base):
        replica: Any = whole.replica_id
        shape: tuple[int, ...] = tuple(whole.local_shape)
        last = first + torch.Size(shape).numel()
        start, stop = max(share.start, first), min(share.stop, last)
        for box in boxes(shape, start - first, stop - first) if start < stop else ():
            at = first + box.start - share.start
            offset = tuple(a + b for a, b in zip(whole.global_offset, box.offset, strict=True))
            for kind, values in share.values.items():
                yield ShardedTensor(
                    f"optimizer.state.{kind}.{whole.key}",
                    values[at : at + box.numel].view(box.size),
                    values.dtype,
                    box.size,
                    whole.global_shape,
                    offset,
                    None,  # no regular grid
                    # Ranks that hold copies of a parameter for data parallelism share this out.
                    (*replica[:2], instance),
                    allow_shape_mismatch=whole.allow_shape_mismatch,
                )


def _stored_tensors(base: Any) -> list[tuple[ShardedTensor, int]]:
    """Return what a parameter is stored as, and where in it, flattened, each tensor starts."""
    if isinstance(base, ShardedTensor):
        found = [(base, 0)]
    else:
        assert isinstance(base, ShardedTensorFactory), type(base)
        # A factory cuts (gate and up projections apart): see where, without any memory.
        probe = torch.empty(base.data.shape, device="meta")
        built: list[ShardedTensor] = list(nested_values(replace(base, data=probe).build()))
        assert all(cut.data is not None and cut.data.is_contiguous() for cut in built), base.key
        found = [(cut, int(cut.data.storage_offset())) for cut in built if cut.data is not None]
    assert all(tensor.prepend_axis_num == 0 for tensor, _ in found), base.key
    return found
