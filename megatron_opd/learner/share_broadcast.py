"""Broadcasts what the head of a model copy receives, as raw bytes: to each rank what it reads.

A request's header goes to the whole copy, a share's part to the ranks of one pipeline stage
(transport/parts.py): a broadcast in a group of the head and these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_opd.transport.samples import Buffer

if TYPE_CHECKING:
    from megatron_opd.learner.world import World


def share_header(header: Buffer, world: World) -> Buffer:
    """Return the head's frame on every rank of its model copy. header: read on the head alone."""
    if world.parallel.world_size == world.parallel.dp:
        return header
    (found,) = broadcast([header], world, world.model_group)
    return found


def deal(parts: Sequence[Sequence[Buffer]], world: World) -> list[Buffer]:
    """Return this rank's part of a share; nothing where the head has none. Collective of the copy.

    parts: the frames of every pipeline stage; read on the head alone, and empty if it has none.
    """
    mine: list[Buffer] = []
    for stage, group in enumerate(world.stage_groups):
        if not world.is_head and stage != world.pp_rank:
            continue
        found = broadcast(parts[stage] if parts else [], world, group)
        if stage == world.pp_rank:
            mine = found
    return mine


def broadcast(frames: Sequence[Buffer], world: World, group: Any) -> list[Buffer]:
    """Return the head's frames on every rank of a group: their number, their sizes, all bytes."""
    if dist.get_world_size(group) == 1:
        return list(frames)
    count = torch.tensor([len(frames)], dtype=torch.int64)
    dist.broadcast(count, src=world.head, group=group)
    if not int(count):
        return []
    sizes = torch.tensor([len(frame) for frame in frames] or [0] * int(count), dtype=torch.int64)
    dist.broadcast(sizes, src=world.head, group=group)
    if not int(sizes.sum()):
        return [b""] * int(count)
    if world.is_head:
        blob = torch.frombuffer(bytearray().join(frames), dtype=torch.uint8)
    else:
        blob = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    dist.broadcast(blob, src=world.head, group=group)
    return [part.numpy().data for part in blob.split(sizes.tolist())]
