"""Makes torch describe a card that is not here, for code that chooses by what it describes.

Nothing can be computed on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

GIB = 2**30
COUNT = 8
"""How many of them the machine has."""


@dataclass(frozen=True)
class Card:
    """What torch.cuda.get_device_properties says of a card. Shared memory is in bytes."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block_optin: int = 232_448
    shared_memory_per_multiprocessor: int = 233_472
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65_536
    warp_size: int = 32


CARDS = {
    "sm_90": Card("NVIDIA H100 80GB HBM3", 9, 0, 132, 79 * GIB, 50 * 2**20),
    "sm_100": Card("NVIDIA B200", 10, 0, 148, 178 * GIB, 126 * 2**20),
}


def pretend(card: Card) -> None:
    """Answer torch's questions as a machine with COUNT such cards would."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: COUNT
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_: (card.major, card.minor)
    cuda.get_device_name = lambda *_: card.name
    cuda.get_device_properties = lambda *_, **__: card
    cuda.mem_get_info = lambda *_: (card.total_memory, card.total_memory)
    for name in ("set_device", "init", "_lazy_init", "empty_cache", "synchronize"):
        setattr(cuda, name, lambda *_, **__: None)
