"""Says which rank holds what of a sharded model, and shares small values among ranks."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_opd.config.learner import ParallelConfig


class Ranks(Protocol):
    """Describes a world as far as its messages need."""

    @property
    def rank(self) -> int:
        """Returns the index of this rank."""
        ...

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        ...

    @property
    def device(self) -> torch.device:
        """Returns the device on which collectives of this world want their tensors."""
        ...


class RankPlacement(Ranks, Protocol):
    """Describes ranks that share one model, and this rank's place among them."""

    @property
    def parallel(self) -> ParallelConfig:
        """Returns how the model is cut."""
        ...

    @property
    def tp_rank(self) -> int:
        """Returns this rank's tensor-parallel slice."""
        ...

    @property
    def ep_rank(self) -> int:
        """Returns this rank's share of the experts."""
        ...

    @property
    def expert_tp_rank(self) -> int:
        """Returns this rank's tensor-parallel slice of an expert."""
        ...


def all_gather_json(value: Any, world: Ranks) -> list[Any]:
    """Gather every rank's value, in rank order, as JSON rather than pickle."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    sizes[world.rank] = len(data)
    dist.all_reduce(sizes)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=world.device)
    padded[: len(data)] = data.to(world.device)
    gathered = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(gathered, padded)
    return [
        json.loads(bytes(buffer[:size].cpu().numpy()))
        for buffer, size in zip(gathered, sizes.tolist(), strict=True)
    ]
