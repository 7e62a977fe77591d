"""Packs arrays of numbers as bytes: four that say how, then little-endian numbers.

Whole numbers take the fewest bytes that hold the largest of them. Log-probs take two bytes each:
the root of -logp in equal steps, so that those of likely ids, near 0, keep their relative
precision. (In equal steps of -logp all of a peaked distribution's become 0, which biases importance
ratios: studies/narrow.py measures both.) Weights of plain draws are counts of hits, and exact;
to the learner others travel as their logs do, in two bytes. `unpack` knows by the first bytes what
it reads, and gives the numbers back in the type that is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_bridge.protocol import MAX_DRAWS

HEADER_BYTES = 4
# whole numbers: of one and two bytes; of three (all low two bytes, then all high ones); any int32
U1, U2, U3, I4 = b"u1\0\0", b"u2\0\0", b"u3\0\0", b"i4\0\0"
# floating-point numbers: as they are; -scale * code^2, scale before the codes; hits / draws;
# exp of what Q2 would hold, and 0 for the highest code
F4, Q2, H1, W2 = b"f4\0\0", b"q2\0\0", b"h1", b"w2\0\0"
CODES = 2**16 - 1
"""Code of the lowest log-prob of an array of Q2."""
LOWEST = -128.0
"""Log-prob below which an array stays F4, so that one of -1e9 does not blur the others, in nats."""
MAX_ERROR = 1.01 * -LOWEST / CODES
"""Largest error of a log-prob in two bytes, in nats: that of the lowest. At -1 beside a lowest of
-20 it is 7e-5."""
MAX_SCALE = float(np.float32(-LOWEST / CODES**2))
LEAST_SCALE = 1e-30
"""Below it float32 cannot divide by a scale."""
LEAST_NARROW = 1e-37
"""Weight below which an array of weights stays F4, so that none above 0 is read as 0."""
LOGP_SLACK = 1e-4
"""Rounding may leave the log of a probability of 1 this far above 0."""


def pack(values: np.ndarray) -> bytes:
    """Returns an array's numbers, exactly: whole numbers (of int32) narrowed, others as float32."""
    if values.dtype.kind == "f":
        return F4 + np.ascontiguousarray(values, dtype="<f4").tobytes()
    flat = np.ascontiguousarray(values).reshape(-1)
    least, most = (int(flat.min()), int(flat.max())) if len(flat) else (0, 0)
    if least < 0 or most >= 2**24:
        if least < -(2**31) or most >= 2**31:
            raise ValueError(f"expected numbers of int32, got {least}..{most}")
        return I4 + flat.astype("<i4").tobytes()
    if most < 2**8:
        return U1 + flat.astype("<u1").tobytes()
    low = flat.astype("<u2").tobytes()
    return U2 + low if most < 2**16 else b"".join([U3, low, (flat >> 16).astype("<u1").tobytes()])


def pack_logp(logp_N: np.ndarray) -> bytes:
    """Returns log-probs in two bytes each; as float32 where one is too low, or no log-prob.

    A log-prob that rounding has left above 0 becomes 0.
    """
    lowest, highest = float(logp_N.min(initial=0.0)), float(logp_N.max(initial=0.0))
    if not (lowest >= LOWEST and highest <= LOGP_SLACK):  # also where one is not finite
        return pack(logp_N)
    scale = np.float32(-lowest / CODES**2)
    if scale < LEAST_SCALE:
        scale, codes = np.float32(0), np.zeros(len(logp_N), dtype="<u2")
    else:
        scaled = np.maximum(logp_N * np.float32(-1 / scale), 0)
        np.sqrt(scaled, out=scaled)
        np.rint(scaled, out=scaled)
        codes = np.minimum(scaled, CODES, out=scaled).astype("<u2")
    return b"".join([Q2, scale.astype("<f4").tobytes(), codes.tobytes()])


def pack_weights(weight_N: np.ndarray, num_draws: int) -> bytes:
    """Returns weights as counts of `num_draws` draws where they are such; else as float32."""
    draws = max(1, num_draws)
    if draws <= MAX_DRAWS:
        hits = np.clip(np.rint(weight_N * np.float32(draws)), 0, draws)
        if np.array_equal(hits / np.float32(draws), weight_N):
            return b"".join([H1, bytes([draws, 0]), hits.astype("<u1").tobytes()])
    return pack(weight_N)


def narrow_weights(weight_N: np.ndarray, num_draws: int) -> bytes:
    """Returns weights as pack_weights does, but in two bytes each where they are no counts.

    Their logs are rounded as log-probs are; 0 stays 0, and no other weight becomes 0.
    """
    exact = pack_weights(weight_N, num_draws)
    above_N = weight_N > 0
    fits = above_N | (weight_N == 0)
    if not exact.startswith(F4) or not fits.all() or not above_N.any():
        return exact
    if weight_N[above_N].min() < LEAST_NARROW or weight_N.max() > 1 + LOGP_SLACK:
        return exact
    log_N = np.minimum(np.log(weight_N, where=above_N, out=np.zeros_like(weight_N)), 0)
    scale = np.float32(-float(log_N.min()) / (CODES - 1) ** 2)
    codes = np.zeros(len(weight_N), dtype="<u2")
    if scale >= LEAST_SCALE:
        codes = np.minimum(np.rint(np.sqrt(log_N * np.float32(-1 / scale))), CODES - 1)
    codes = np.where(above_N, codes, CODES).astype("<u2")
    return b"".join([W2, scale.astype("<f4").tobytes(), codes.tobytes()])


def unpack(raw: Any, dtype: str) -> np.ndarray:
    """Returns the one-dimensional array that was packed, in a type that holds its numbers.

    Raises ValueError when `raw` is no such array, or holds numbers that `dtype` does not.
    """
    if not isinstance(raw, bytes | bytearray | memoryview):
        raise ValueError(f"expected bytes, got {type(raw).__name__}")
    kind = np.dtype(dtype)
    found = _floats(raw) if kind.kind == "f" else _whole(raw)
    if kind.kind == "f" or found.dtype == kind:
        return found
    if len(found) and not np.can_cast(found.dtype, kind):
        held = np.iinfo(kind)
        least, most = int(found.min()), int(found.max())
        if least < held.min or most > held.max:
            raise ValueError(f"numbers {least}..{most} are not of {dtype}")
    return found.astype(kind)


def _whole(raw: bytes | bytearray | memoryview) -> np.ndarray:
    code, size = bytes(raw[:HEADER_BYTES]), len(raw) - HEADER_BYTES
    width = {U1: 1, U2: 2, U3: 3, I4: 4}.get(code)
    if width is None:
        raise ValueError(f"expected whole numbers, got an array that begins with {code!r}")
    count = _count(size, width)
    if code != U3:
        return np.frombuffer(raw, {U1: "<u1", U2: "<u2", I4: "<i4"}[code], offset=HEADER_BYTES)
    low = np.frombuffer(raw, "<u2", count, offset=HEADER_BYTES)
    found = np.frombuffer(raw, "<u1", offset=HEADER_BYTES + 2 * count).astype(np.int32)
    found <<= 16
    found |= low
    return found


def _floats(raw: bytes | bytearray | memoryview) -> np.ndarray:
    code, size = bytes(raw[:HEADER_BYTES]), len(raw) - HEADER_BYTES
    if code == F4:
        _count(size, 4)
        return np.frombuffer(raw, "<f4", offset=HEADER_BYTES)
    if code in (Q2, W2):
        _count(size - 4, 2)
        (scale,) = np.frombuffer(raw, "<f4", 1, offset=HEADER_BYTES)
        if not 0 <= scale <= MAX_SCALE:
            raise ValueError(f"log-probs of scale {scale:g}, expected 0 to {MAX_SCALE:g}")
        codes = np.frombuffer(raw, "<u2", offset=HEADER_BYTES + 4)
        root = codes.astype(np.float32)
        root *= root
        root *= -scale
        return root if code == Q2 else np.where(codes == CODES, np.float32(0), np.exp(root))
    if code[:2] == H1 and size >= 0 and code[3] == 0 and 1 <= code[2] <= MAX_DRAWS:
        hits = np.frombuffer(raw, "<u1", offset=HEADER_BYTES)
        if len(hits) and int(hits.max()) > code[2]:
            raise ValueError(f"{int(hits.max())} hits of {code[2]} draws")
        return hits / np.float32(code[2])
    raise ValueError(f"expected floating-point numbers, got an array that begins with {code!r}")


def _count(size: int, width: int) -> int:
    if size < 0 or size % width:
        raise ValueError(f"{size} bytes are not a whole number of {width}-byte items")
    return size // width
