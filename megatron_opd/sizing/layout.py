"""Says which layers a pipeline stage holds, and which ranks talk to each other.

Rank order is Megatron's "tp-cp-ep-dp-pp", first the fastest: dense weights see the axes tp, cp, dp,
pp, experts see etp, ep, expert dp, pp over the same ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import ModelSpec

Axes = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Lists all groups of one kind. use: what travels in them."""

    name: str
    use: str
    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Returns the number of ranks of a group."""
        return len(self.members[0])


def stage_layers(
    spec: ModelSpec, parallel: ParallelConfig, fields: Mapping[str, Any] | None = None
) -> list[list[range]]:
    """Return each stage's model chunks (one without interleaving), as ranges of global layers.

    fields: learner.megatron; its uneven splits are Megatron's get_num_layers_to_build.
    """
    counts = _stage_counts(spec.num_layers, parallel.pp, fields or {})
    found: list[list[range]] = [[] for _ in counts]
    first = 0
    for part in range(parallel.vpp):
        for stage, count in enumerate(counts):
            size = count // parallel.vpp
            if (fields or {}).get("account_for_embedding_in_pipeline_split"):
                size -= part == 0 and stage == 0
            if (fields or {}).get("account_for_loss_in_pipeline_split"):
                size -= part == parallel.vpp - 1 and stage == parallel.pp - 1
            found[stage].append(range(first, first + size))
            first += size
    return found


def _stage_counts(num_layers: int, pp: int, fields: Mapping[str, Any]) -> list[int]:
    """Count the layers of each stage; embedding and loss count as one each where so chosen."""
    ends = (
        fields.get("num_layers_in_first_pipeline_stage"),
        fields.get("num_layers_in_last_pipeline_stage"),
    )
    if ends != (None, None) and pp > 1:
        free = pp - sum(end is not None for end in ends)
        each = (num_layers - sum(end or 0 for end in ends)) // max(1, free)
        counts = [each] * pp
        counts[0] = each if ends[0] is None else ends[0]
        counts[-1] = each if ends[1] is None else ends[1]
        return counts
    extra = bool(fields.get("account_for_embedding_in_pipeline_split"))
    extra += bool(fields.get("account_for_loss_in_pipeline_split"))
    return [(num_layers + extra) // pp] * pp


def in_flight_chunks(parallel: ParallelConfig, stage: int) -> int:
    """Count the model chunks whose activations a stage holds at most, given enough micro-batches.

    1F1B: pp - stage micro-batches (Narayanan et al. 2021, sec. 2.2.1). Interleaved: the warm-up of
    2 (pp - stage - 1) + (vpp - 1) pp chunks, and the one that is next.
    """
    if parallel.vpp == 1:
        return parallel.pp - stage
    return 2 * (parallel.pp - stage - 1) + (parallel.vpp - 1) * parallel.pp + 1


def expert_data_parallel(parallel: ParallelConfig) -> int:
    """Count the ranks that hold the same experts, and share their optimizer state."""
    stage = parallel.tp * parallel.cp * parallel.dp
    return stage // (parallel.ep * parallel.expert_tp)


def dense_axes(parallel: ParallelConfig) -> Axes:
    """Return the axes of the ranks as dense weights see them, with their sizes, fastest first."""
    return (
        ("tp", parallel.tp),
        ("cp", parallel.cp),
        ("dp", parallel.dp),
        ("pp", parallel.pp),
    )


def expert_axes(parallel: ParallelConfig) -> Axes:
    """Return the axes of the same ranks as experts see them."""
    return (
        ("etp", parallel.expert_tp),
        ("ep", parallel.ep),
        ("edp", expert_data_parallel(parallel)),
        ("pp", parallel.pp),
    )


def rank_groups(parallel: ParallelConfig, moe: bool) -> list[RankGroups]:
    """Return each kind of communication group of the learner that has two ranks or more."""
    dense, expert = dense_axes(parallel), expert_axes(parallel)
    kinds = [
        ("tp", "all-gather and reduce-scatter of activations, each layer", dense, ("tp",)),
        ("cp", "keys and values of a sequence, each layer", dense, ("cp",)),
        ("pp", "activations and their gradients, each micro-batch", dense, ("pp",)),
        ("dp x cp", "dense gradients and weights, each step", dense, ("cp", "dp")),
    ]
    if moe:
        kinds += [
            ("ep", "tokens to their experts and back, each layer", expert, ("ep",)),
            ("etp", "tokens of an expert, each layer", expert, ("etp",)),
            ("expert dp", "expert gradients and weights, each step", expert, ("edp",)),
        ]
    found = [RankGroups(name, use, groups_along(axes, along)) for name, use, axes, along in kinds]
    return [groups for groups in found if groups.size > 1]


def groups_along(axes: Axes, along: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Group the ranks that differ only in the axes `along`. The first axis is the fastest."""
    strides = {
        name: math.prod(size for _, size in axes[:place]) for place, (name, _) in enumerate(axes)
    }

    def offsets(names: Sequence[str]) -> list[int]:
        steps = [
            [strides[name] * index for index in range(size)] for name, size in axes if name in names
        ]
        return sorted(sum(combination) for combination in itertools.product(*steps))

    others = [name for name, _ in axes if name not in along]
    return tuple(tuple(base + step for step in offsets(along)) for base in offsets(others))
