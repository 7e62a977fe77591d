"""Defines what a verifier's judgement may be, and how one that cannot be used is reported.

Invariant: a reward is a finite number in [0, 1], or VerifierFailed says why there is none.
"""

from __future__ import annotations

from typing import Any

from megatron_opd.records.drops import VERIFIER_BAD_REWARD


class VerifierFailed(Exception):
    """Reports that a verifier gave no judgement. `reason`: one of VERIFIER_REASONS, to count.

    detail: one line for the log.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def out_of_numpy(value: Any) -> Any:
    """Return the number of Python's that a number of numpy's is; anything else as it is."""
    single = type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1
    return value.item() if single else value


def checked_reward(judgement: Any) -> float:
    """Return a judgement as a reward: true is 1, false 0. VerifierFailed: it is not in [0, 1]."""
    judgement = out_of_numpy(judgement)
    if not isinstance(judgement, bool | int | float) or not 0 <= judgement <= 1:
        plain = isinstance(judgement, float | str | None)
        given = repr(judgement)[:40] if plain else f"a value of type {type(judgement).__name__}"
        raise VerifierFailed(
            VERIFIER_BAD_REWARD, f"must be a bool or a number in [0, 1], got {given}"
        )
    return float(judgement)
