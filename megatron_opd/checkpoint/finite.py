"""Checks whether a stored tensor holds only finite numbers, from its bytes alone. Torch-free.

A floating-point number whose exponent bits are all ones is an infinity or not a number.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_opd.checkpoint.hf_files import DTYPE_BITS, CodedTensor, StoredTensor

CHUNK_BYTES = 2**26
# dtype -> (unsigned integer of its width, exponent bits, mantissa bits)
_BITS = {
    "F32": (np.dtype("<u4"), 0x7F800000, 0x007FFFFF),
    "BF16": (np.dtype("<u2"), 0x7F80, 0x007F),
    "F16": (np.dtype("<u2"), 0x7C00, 0x03FF),
    # these have no infinity, and one NaN, of either sign
    "F8_E4M3": (np.dtype("u1"), 0x7F, 0x7F),
    "F8_E8M0": (np.dtype("u1"), 0xFF, 0xFF),
}


def first_not_finite(stored: StoredTensor) -> str | None:
    """Return the first number that is not finite, as `NaN at element 7`; None when all are.

    Of a quantised tensor numbers and scales are, each by itself. Types that no learner takes are
    not checked. May raise OSError.
    """
    if isinstance(stored, CodedTensor):
        scales = stored.scales
        if stored.format.method == "mxfp4":
            scales = replace(scales, dtype="F8_E8M0")
        found = first_not_finite(scales)
        return f"{found} of its scales" if found else first_not_finite(stored.numbers)
    if stored.dtype not in _BITS:
        return None
    kind, exponent, mantissa = _BITS[stored.dtype]
    left, done = stored.num_bytes, 0
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset)
        while left:
            data = stream.read(min(left, CHUNK_BYTES))
            if not data:
                raise OSError(f"{stored.file} ends before its tensors do")
            bits = np.frombuffer(data, kind)
            bad = (bits & exponent) == exponent
            if bad.any():
                index = int(bad.argmax())
                what = "NaN" if bits[index] & mantissa else "an infinity"
                return f"{what} at element {done * 8 // DTYPE_BITS[stored.dtype] + index}"
            left -= len(data)
            done += len(data)
    return None
