"""The supports that are compared, and what a cache of each takes in bytes.

Ids of this vocabulary (49,152) take two bytes. No size counts the response's own ids or the prompt.
"""

from __future__ import annotations

from studies.variance.exact import Split

ATOMS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
CUTS = (0, *ATOMS, 64)
"""Numbers of likeliest ids after which the tail's sums are kept; those above 0 are top-k's too."""
MONTE_CARLO = tuple(Split(0, m) for m in (1, 2, 4, 8, 16, 32, 64))
DRAWS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
FIXED = tuple(Split(k, m) for k in ATOMS for m in DRAWS)
THIN = tuple(Split(k, m, thin=True) for k in ATOMS for m in DRAWS[1:])
UNBIASED = (*MONTE_CARLO, *FIXED, *THIN)
TOP_K = tuple(Split(k, 0) for k in CUTS if k)

ID_BYTES, TOKEN_BYTES = 16, 20  # metrics/cache_size.py: as the controller holds it
# sglang_bridge/arrays.py, of each cached id: 2 for its id on three wires (the student's reply, the
# request for scores, to the learner), 2 for the sampler's log-prob on two, 2 for the teacher's on
# two; and its weight on two: a count of 1 byte, or of a support with atoms 4 from the server and 2
# to the learner.
WIRE_ID_BYTES = 3 * 2 + 2 * 2 + 2 * 2
COUNT_BYTES, WEIGHT_BYTES = 2 * 1, 4 + 2
# of each token: length of its row on three wires; place of the path in it and the path's float32
# log-prob on two
WIRE_TOKEN_BYTES = 3 * 1 + 2 * (1 + 4)


def name_of(split: Split) -> str:
    """Return mc_64, top_16, atoms_tail_16_48 or atoms_tail_16_48_thin."""
    return f"top_{split.atoms}" if split.draws == 0 else split.name


def cache_bytes(ids: float) -> float:
    """Return what a run reports as cache_bytes_per_token, for a mean number of cached ids."""
    return ID_BYTES * ids + TOKEN_BYTES


def wire_bytes(split: Split, ids: float) -> float:
    """Return the bytes a token on all four wires together, for a mean number of cached ids."""
    weight = WEIGHT_BYTES if split.atoms else COUNT_BYTES
    return (WIRE_ID_BYTES + weight) * ids + WIRE_TOKEN_BYTES
