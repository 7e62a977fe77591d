"""Digests weights, so that learner and server can compare slices without moving them.

Torch-free.
"""

from __future__ import annotations

import hashlib

import numpy as np


def digest(data: bytes | memoryview | np.ndarray) -> str:
    """Returns BLAKE2b of a contiguous buffer's bytes, in order: 16 hexadecimal digits.

    For a torch tensor: `digest(tensor.contiguous().cpu().view(torch.uint8).numpy())`, which works
    for bfloat16 too.
    """
    raw = data.data if isinstance(data, np.ndarray) else data
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
