"""Derives one seed for each random part of a run from the run's seed and the part's name."""

from __future__ import annotations

import hashlib

ROLLOUT, SCORE, EVALUATION = "rollout", "score", "evaluation"
HEALTH, LEAK, WRITING = "health", "leak", "writing"
ENVIRONMENT, USER = "environment", "user"
MIXTURE, CURRICULUM = "mixture", "curriculum"


def derived_seed(run_seed: int, kind: str, *index: int) -> int:
    """Return a seed in [0, 2^63), the same in every process and version of Python.

    Two parts of a run get the same seed with probability 2^-63.
    """
    name = ":".join(map(str, (run_seed, kind, *index)))
    digest = hashlib.blake2b(name.encode("ascii"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
