"""Provides the secret that a learner shows to its controller.

`opd run` hands the learner that it starts the run's own through the environment. With `opd control`
both sides take what the environment holds, or the learner reads the token that the controller wrote
into run.dir, in a file that only its user may read.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_opd.checkpoint.run_lock import LOCK, read_holder

TOKEN_VARIABLE = "MEGATRON_OPD_TOKEN"
LEAST, MOST = 16, 255
"""Least and most characters of a token; ZeroMQ accepts no longer password."""


def given_token() -> str | None:
    """Return the environment's token. ValueError: it is too short to be a secret, or too long."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token is not None and not (LEAST <= len(token.encode()) <= MOST):
        raise ValueError(
            f"{TOKEN_VARIABLE} must have {LEAST} to {MOST} bytes, got {len(token.encode())}"
        )
    return token


def learners_token(run_dir: Path) -> str | None:
    """Return what a learner shows now, None before its controller wrote one.

    ValueError: as above.
    """
    token = given_token()
    if token is not None:
        return token
    held = read_holder(run_dir / LOCK)
    return None if held is None else held.token
