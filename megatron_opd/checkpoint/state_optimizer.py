"""The float32 optimizer of a learner as sharded tensors, whatever the layout.

Only tensors are kept: main parameters, first and second moments, each in the shape of its model
parameter, and one step count for all. Rates, betas and weight decay follow from the configuration.
So nothing of a checkpoint depends on how many optimizers Megatron chains (two with expert
parallelism, one without) nor on how it groups parameters, and Megatron's own `state_dict` and
`load_state_dict` are not needed. With torch's Adam (no TransformerEngine, no apex) these fail in
megatron-core 0.16.1: the first reads the step of a state that is still empty, the second gives all
parameters one shared step tensor, which then counts every parameter's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # Gathered to the first data-parallel rank's host memory: no device ever holds all of it.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "singleton_local_shards": True,
    "chained_optim_avoid_prefix": True,
}


def parts_of(optimizer: MegatronOptimizer) -> Sequence[DistributedOptimizer]:
    """The chained optimizers that have parameters here.

    ValueError: one of them keeps its state where it cannot be read (CPU offload).
    """
    chained: list[Any] = (
        optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    )
    parts = [part for part in chained if not getattr(part, "is_stub_optimizer", False)]
    for part in parts:
        if type(part.optimizer).__name__ == "HybridDeviceOptimizer":
            raise ValueError(
                "checkpoint.every must be 0 with learner.optimizer.optimizer_cpu_offload: its "
                "state cannot be saved"
            )
    return parts


def sharded_optimizer(
    optimizer: MegatronOptimizer, model: dict[str, Any], *, loading: bool
) -> dict[str, Any]:
    """Sharded tensors of the optimizer of `model`'s sharded tensors. Collective."""
    found: dict[str, Any] = {}
    for index, part in enumerate(parts_of(optimizer)):
        if loading and not part.optimizer.state:
            # Makes the moments; all of it is overwritten by what is loaded.
            part._init_optimizer_states_with_dummy_values()  # pyright: ignore[reportPrivateUsage]
        states = part.sharded_param_state_fully_reshardable(model, loading, METADATA)
        if states is not None:  # only the first data-parallel rank saves
            found[str(index)] = states
    return found


def load_optimizer(optimizer: MegatronOptimizer, loaded: dict[str, Any], step: int) -> None:
    """Take over what was loaded into `sharded_optimizer`'s tensors, and the step count."""
    for index, part in enumerate(parts_of(optimizer)):
        states: list[dict[str, Any]] = list(part.optimizer.state.values())
        # Megatron copies every entry of a state, and a step is none of the loaded tensors.
        own_steps = [state.pop("step", None) for state in states]
        part.load_parameter_state_from_fully_reshardable(loaded[str(index)])
        for state, own in zip(states, own_steps, strict=True):
            if own is not None:
                # One tensor each: torch's Adam adds to it in place.
                state["step"] = torch.full_like(torch.as_tensor(own), step)
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = step


def step_count(optimizer: MegatronOptimizer) -> int:
    """Optimizer steps taken, the same for all parameters."""
    counts: set[int] = set()
    for part in parts_of(optimizer):
        counts |= {int(s["step"]) for s in part.optimizer.state.values() if "step" in s}
        counts |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group}
    assert len(counts) <= 1, f"parameters have taken different numbers of steps: {counts}"
    return counts.pop() if counts else 0
