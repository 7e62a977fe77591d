"""Digests weights, so that learner and servers can compare slices without moving them.

The digest of a slice is the sum, modulo 2^64, of its numbers' bits times an odd key of the row and
an odd key of the column, both counted in the whole tensor. So digests of parts add up to that of
the whole, however it was cut: every rank of a learner digests what it holds, on its device. A
changed bit changes the digest; so do numbers, rows or columns that changed places, and a transposed
matrix, but for a chance far below 2^-32. It is no cryptographic hash.
"""

from __future__ import annotations

from functools import lru_cache

import torch

CHUNK = 1 << 18
"""Numbers that are digested at once, in int64: as many as a CPU's cache holds."""
ON_GPU = 16
"""Times as many are digested at once on a GPU, where it is launches that cost."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODULUS = 1 << 64
ROWS, COLUMNS = 0, 1


def digest(tensor: torch.Tensor, row: int = 0, column: int = 0) -> int:
    """Digest a slice of a matrix or vector, whose first number is at (row, column) of the whole.

    A vector is a matrix of one column. Returns 0 <= digest < 2^64; the sum of the digests of
    disjoint slices, modulo 2^64, is that of their union.
    """
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    (height, width), device = matrix.shape, matrix.device
    columns_W = _keys(COLUMNS, column, width, device)
    sums_H = torch.empty(height, dtype=torch.int64, device=device)
    step = max(1, CHUNK * (1 if device.type == "cpu" else ON_GPU) // max(1, width))
    # one buffer for all chunks: fresh memory costs more than the sum
    buffer = torch.empty(min(step, height), width, dtype=torch.int64, device=device)
    for first in range(0, height, step):
        # contiguous piece by piece: some columns of a large matrix are not copied at once
        part = matrix[first : first + step].contiguous().view(BITS[matrix.dtype.itemsize])
        numbers = buffer[: len(part)].copy_(part)
        torch.sum(numbers.mul_(columns_W), dim=1, out=sums_H[first : first + step])
    return int((sums_H * _keys(ROWS, row, height, device)).sum()) % MODULUS


def slice_digest(tensor: torch.Tensor, dim: int, start: int) -> int:
    """Digest a slice that begins at index `start` of dimension `dim` of the whole."""
    return digest(tensor, *((0, start) if dim else (start, 0)))


def as_text(total: int) -> str:
    """Return a digest as it is sent: 16 hexadecimal digits."""
    return f"{total % MODULUS:016x}"


def signed(total: int) -> int:
    """Return a digest as an int64, in which sums of torch wrap around as digests do."""
    return (total + MODULUS // 2) % MODULUS - MODULUS // 2


@lru_cache(maxsize=16)
def _keys(axis: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the odd keys of `count` rows or columns: the mixing function of SplitMix64.

    Rows and columns never share a key: a transposed matrix would have the same digest.
    """
    numbers = torch.arange(first, first + count, dtype=torch.int64, device=device)
    keys = (2 * numbers + (axis + 1)) * signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ _shifted(keys, shift)) * signed(factor)
    return (keys ^ _shifted(keys, 31)) | 1


def _shifted(keys: torch.Tensor, by: int) -> torch.Tensor:
    """Return the keys shifted right and filled with zeros, where torch copies the sign."""
    return (keys >> by) & ((1 << (64 - by)) - 1)
