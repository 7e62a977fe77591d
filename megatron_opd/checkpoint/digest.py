"""Tells tensors apart by their numbers: one by its bytes, many by the numbers they hold together.

The second does not depend on how the numbers are named, cut, fused or ordered, so that it compares
two checkpoints without what converted one into the other.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22
# Of splitmix64 (Steele, Lea, Flood 2014), as signed numbers: products wrap.
_STEPS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))


def entry_of(tensor: torch.Tensor) -> dict[str, str]:
    """Return {dtype, digest}, which tells a tensor from a damaged one."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "digest": hashlib.blake2b(data.data, digest_size=8).hexdigest(),
    }


@dataclass(frozen=True, slots=True)
class Numbers:
    """Describes many numbers by their count and the sum of their hashes, modulo 2**64."""

    count: int = 0
    total: int = 0

    def plus(self, tensor: torch.Tensor) -> Numbers:
        """Return these and a tensor's."""
        total = self.total
        for block in tensor.contiguous().view(-1).split(_BLOCK):
            total += _hashed(block)
        return Numbers(self.count + tensor.numel(), total % 2**64)


def _hashed(block: torch.Tensor) -> int:
    mixed = block.view(_BITS[block.element_size()]).to(torch.int64) * 0x1E3779B97F4A7C15
    for shift, factor in _STEPS:
        # a shift of signed numbers copies the sign: the bits that it brings are masked
        mixed = (mixed ^ (mixed >> shift & ((1 << (64 - shift)) - 1))) * factor
    return int(mixed.sum())
