"""Says where transformers 5 holds a checkpoint's tensor in memory. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InMemory:
    """Says where transformers 5 holds a checkpoint's tensor in memory, and writes it when told to.

    index: along a leading dimension of experts, None without. part of parts: along the next one.
    """

    name: str
    index: int | None
    part: int = 0
    parts: int = 1


_IN_MEMORY = (
    (r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(?:gate_proj|w1)\.weight", "gate_up_proj", 0, 2),
    (r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(?:up_proj|w3)\.weight", "gate_up_proj", 1, 2),
    (r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(?:down_proj|w2)\.weight", "down_proj", 0, 1),
)
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")


def in_memory(name: str) -> InMemory | None:
    """Return the other spelling of a checkpoint's tensor name; None: there is none."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    prefix, rest = found.groups()
    if rest == "block_sparse_moe.gate.weight":
        return InMemory(f"{prefix}mlp.gate.weight", None)
    for pattern, tensor, part, parts in _IN_MEMORY:
        match = re.fullmatch(pattern, rest)
        if match is not None:
            return InMemory(f"{prefix}mlp.experts.{tensor}", int(match[1]), part, parts)
    return None
