"""Who holds what of a sharded model, and small values told to everyone."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_opd.config.learner import ParallelConfig


class Ranks(Protocol):
    """A world as far as its messages are concerned."""

    @property
    def rank(self) -> int:
        """The index of this rank."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def device(self) -> torch.device:
        """Where collectives of this world want their tensors."""
        ...


class Placement(Ranks, Protocol):
    """Ranks that share one model, and this rank's place in it."""

    @property
    def parallel(self) -> ParallelConfig:
        """How the model is cut."""
        ...

    @property
    def tp_rank(self) -> int:
        """This rank's tensor-parallel slice."""
        ...

    @property
    def ep_rank(self) -> int:
        """This rank's share of the experts."""
        ...

    @property
    def expert_tp_rank(self) -> int:
        """This rank's tensor-parallel slice of an expert."""
        ...


def all_gather_json(value: Any, world: Ranks) -> list[Any]:
    """Every rank's value, in rank order; JSON rather than pickle travels."""
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
