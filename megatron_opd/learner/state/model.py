"""Presents the learner's weights as sharded tensors, written by all ranks that hold copies.

Invariant: of the ranks that hold the same piece of a weight, one writes it; which one follows from
what all of them know, and each of a data-parallel group writes about as many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel

# One stored tensor for a parameter of one layer, one expert: what every layout can find its own in.
CONTENT = {"singleton_local_shards": True}


def sharded_model(chunks: Sequence[DistributedDataParallel]) -> dict[str, dict[str, Any]]:
    """Return Megatron's sharded tensors and objects of every chunk, by chunk and name."""
    model: dict[str, dict[str, Any]] = {
        str(index): module_of(chunk).sharded_state_dict(metadata=dict(CONTENT))
        for index, chunk in enumerate(chunks)
    }
    # Copies are in two kinds of groups: of all weights but the experts', and of the experts'.
    loads = {
        True: [0] * ps.get_data_parallel_world_size(with_context_parallel=True),
        False: [0] * ps.get_expert_data_parallel_world_size(),
    }
    for entries in model.values():
        for entry in entries.values():
            if not isinstance(entry, ShardedObject):
                dense: bool = getattr(entry.data, "allreduce", True)
                entry.replica_id = _rotated(entry.replica_id, entry.data.nbytes, loads[dense])
    return model


def _rotated(replica: tuple[int, ...], num_bytes: int, loads: list[int]) -> tuple[int, ...]:
    """Return the replica number that makes the least loaded member the writer (all zeros).

    replica: Megatron's, whose last number is this rank's place in the group. loads: bytes that each
    member of the group writes; updated.
    """
    writer = loads.index(min(loads))
    loads[writer] += num_bytes
    return (*replica[:-1], (replica[-1] - writer) % len(loads))


def without_pickles(
    model: dict[str, dict[str, Any]],
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Split into (sharded tensors, what modules keep as pickles here): the latter are never read.

    TransformerEngine's `_extra_state` is unpickled by the module that takes it over.
    """
    tensors: dict[str, dict[str, Any]] = {}
    pickled: dict[str, dict[str, Any]] = {}
    for index, entries in model.items():
        objects = {n: e for n, e in entries.items() if isinstance(e, ShardedObject)}
        pickled[index] = {name: entry.data for name, entry in objects.items()}
        tensors[index] = {n: e for n, e in entries.items() if n not in objects}
    return tensors, pickled


def module_of(chunk: DistributedDataParallel) -> Any:
    """Return the model in Megatron's wrapper."""
    return cast(Any, chunk.module)
