"""Applies trust regions: what is maximised in place of r A. Axis n: actions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_opd.config.trust import ClipTrust, M2Trust, NoTrust, TrustConfig


@dataclass(frozen=True)
class Trusted:
    """Holds surrogate_n, which is maximised, and stopped_n, the actions that got no gradient."""

    surrogate_n: torch.Tensor
    stopped_n: torch.Tensor


def unbounded(
    config: NoTrust, log_r_n: torch.Tensor, advantage_n: torch.Tensor, limit: torch.Tensor | None
) -> Trusted:
    """Return r A (AsyncOPD Eq. 7, "no clip")."""
    surrogate_n = log_r_n.exp() * advantage_n
    return Trusted(surrogate_n, torch.zeros_like(advantage_n, dtype=torch.bool))


def clipped(
    config: ClipTrust, log_r_n: torch.Tensor, advantage_n: torch.Tensor, limit: torch.Tensor | None
) -> Trusted:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) (AsyncOPD Eq. 4), with PPO's dual clip.

    dual: the maximum of that and dual A where A < 0. It is a lower bound of r A, so biased: an
    action that has moved past an edge the way A pushes it has no gradient. PPO's minimum is used
    for every objective; GEPO Eq. 8 and 10 write clip(r) A alone.
    """
    r_n = log_r_n.exp()
    bounded_n = r_n.clamp(1 - config.low, 1 + config.high) * advantage_n
    surrogate_n = torch.minimum(r_n * advantage_n, bounded_n)
    negative_n = advantage_n < 0
    past_n = torch.where(negative_n, r_n < 1 - config.low, r_n > 1 + config.high)
    stopped_n = past_n & (advantage_n != 0)
    if config.dual is not None:
        floor_n = config.dual * advantage_n
        below_n = negative_n & (surrogate_n < floor_n)
        surrogate_n = torch.where(below_n, floor_n, surrogate_n)
        stopped_n = stopped_n | below_n
    return Trusted(surrogate_n, stopped_n)


def second_moment(
    config: M2Trust, log_r_n: torch.Tensor, advantage_n: torch.Tensor, limit: torch.Tensor | None
) -> Trusted:
    """Return r A, 0 where (log r)^2 >= limit and the action already moved along A (M2PO).

    Not 0 within the least distance from 1. The authors' code keeps the value clip(r) A of a masked
    action; its gradient is 0 there too.
    """
    assert limit is not None
    moment_n = log_r_n.detach().square()
    low, high = config.least_low or 0.0, config.least_high or 0.0
    down = math.log1p(-low) if low < 1 else -math.inf
    beyond_n = torch.where(
        advantage_n < 0, log_r_n.detach() < down, log_r_n.detach() > math.log1p(high)
    )
    stopped_n = moved_along(log_r_n, advantage_n) & (moment_n >= limit) & beyond_n
    surrogate_n = torch.where(stopped_n, 0.0, log_r_n.exp() * advantage_n)
    return Trusted(surrogate_n, stopped_n)


SUM_BLOCK = 128
"""How many values one product adds up in running_sum."""

TRUSTS: dict[type[TrustConfig], Callable[..., Trusted]] = {
    NoTrust: unbounded,
    ClipTrust: clipped,
    M2Trust: second_moment,
}


def trusted(
    config: Any, log_r_n: torch.Tensor, advantage_n: torch.Tensor, limit: torch.Tensor | None
) -> Trusted:
    """Return the configured surrogate. limit: of (log r)^2 over the mini-batch, M2PO only."""
    return TRUSTS[type(config)](config, log_r_n, advantage_n, limit)


def moved_along(log_r_n: torch.Tensor, advantage_n: torch.Tensor) -> torch.Tensor:
    """Return bool [n]: r > 1 with A > 0, or r < 1 with A < 0."""
    return log_r_n.detach() * advantage_n > 0


def second_moment_limit(
    log_r_n: torch.Tensor, advantage_n: torch.Tensor, weight_n: torch.Tensor, config: M2Trust
) -> torch.Tensor:
    """Return the (log r)^2 from which actions that moved along are masked (M2PO Alg. 1).

    Scalar float64; inf when none is. weight_n: of each action in the mean. `kept`: the largest
    limit such that the candidates below it average <= threshold. `capped`: the largest (log r)^2 of
    a candidate such that all candidates, those beyond counted as it, average <= threshold; 0 when
    even the smallest is too much. Over the whole mini-batch, where the authors take each
    micro-batch by itself: the mask does not depend on how samples are packed.
    """
    if not len(log_r_n):
        return log_r_n.new_full((), torch.inf, dtype=torch.float64)
    along_n = moved_along(log_r_n, advantage_n)
    # The others stay among the candidates, without weight: a mask as an index would wait for the
    # device.
    moment_n, order_n = log_r_n.detach().double().square().sort()
    along_n = along_n[order_n]
    weight_n = weight_n.double()[order_n].where(along_n, 0.0)
    moment_n = moment_n.where(along_n, 0.0)
    below_n, sum_n = running_sum(weight_n), running_sum(moment_n * weight_n)
    if config.moment == "kept":
        over_n = along_n & (sum_n / below_n > config.threshold)
        return moment_n.where(over_n, torch.inf).amin()
    capped_n = (sum_n + moment_n * (below_n[-1] - below_n)) / below_n[-1]
    within_n = along_n & (capped_n <= config.threshold)
    limit = moment_n.where(within_n, 0.0).amax()
    return limit.where(sum_n[-1] > config.threshold * below_n[-1], torch.inf)


def running_sum(value_n: torch.Tensor) -> torch.Tensor:
    """Return the sums of the first 1, 2, .. n values, which must be finite: float64 [n].

    By products with a triangle of ones: CUDA's cumsum of floats adds in no fixed order, and
    deterministic algorithms refuse it.
    """
    count = len(value_n)
    rows = -(-count // SUM_BLOCK)
    padded = value_n.new_zeros(rows * SUM_BLOCK, dtype=torch.float64)
    padded[:count] = value_n
    triangle = padded.new_ones(SUM_BLOCK, SUM_BLOCK).triu()
    within = padded.view(rows, SUM_BLOCK) @ triangle
    if rows > 1:
        within[1:] += running_sum(within[:-1, -1])[:, None]
    return within.flatten()[:count]
