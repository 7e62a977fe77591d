"""Decides what becomes of a response that was cut at its limit of tokens, or came near it.

Source: DAPO (arXiv 2503.14476), sec. 3.4: overlong filtering (here `mask`) and Eq. 13.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.selection import (
    FilterOverlong,
    MaskOverlong,
    OverlongConfig,
    SoftPenalty,
)
from megatron_opd.records.drops import OVERLONG
from megatron_opd.records.types import AnyRollout

CUT = "length"


@dataclass(frozen=True, slots=True)
class Length:
    """Says what a response's length does: penalty, <= 0, to its reward; masked: no loss."""

    penalty: float = 0.0
    masked: bool = False


def judged_length(config: OverlongConfig, rollout: AnyRollout, limit: int) -> Length:
    """Return what the length of a rollout does. limit: most tokens of its response.

    Raises ScoreRejected where it is to be dropped.
    """
    cut, tokens = rollout.finish_reason == CUT, rollout.num_response_tokens
    if cut and isinstance(config, FilterOverlong):
        raise ScoreRejected(OVERLONG, f"cut at {tokens} tokens")
    if isinstance(config, SoftPenalty):
        return Length(penalty=soft_penalty(tokens, limit, config.cache, config.scale))
    return Length(masked=cut and isinstance(config, MaskOverlong))


def soft_penalty(tokens: int, limit: int, cache: int, scale: float) -> float:
    """Return scale * R_length (DAPO Eq. 13), with L_max = limit and L_cache = cache.

    R_length = 0 up to limit - cache tokens, (limit - cache - tokens) / cache up to the limit, and
    -1 beyond it.
    """
    return scale * max(-1.0, min(0.0, (limit - cache - tokens) / cache))
