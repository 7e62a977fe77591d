"""Draws how long messages are held back, from config/delays.py's distributions (HeteroRL sec. 4.1).

Invariant: the delay of message i of a stream is a function of (seed, stream, i) alone, so that it
is the same after a restart, in another process, and in whatever order messages are asked for.

Every type is the inverse of its distribution's function at a uniform share in (0, 1), cut at
high_s. With u the share, Q(p) the quantile at p:

    lognormal    exp(mu + sigma z(u)), z of the standard normal;  Q(0.0025) = low, Q(0.9975) = high
    weibull      scale (-ln(1 - u))^(1 / shape);                  Q(0.0025) = low, Q(0.9975) = high
    exponential  low - scale ln(1 - u);                           Q(0) = low,      Q(0.995) = high

so 99.5% of all draws lie between low_s and high_s whichever it is. The paper gives that interval
and no parameters. An exponential distribution has one parameter besides its start, so it has no
part below low_s, and all of the other 0.5% is above high_s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Self

from megatron_opd.buffer.planned import BatchPlan
from megatron_opd.config.delays import DelayConfig
from megatron_opd.config.schedule import ScheduleConfig
from megatron_opd.config.tree import ConfigTree
from megatron_opd.records.seeds import derived_seed

INSIDE = 0.995
"""Share of the draws between low_s and high_s."""
TAIL = (1 - INSIDE) / 2
"""Share of the draws of lognormal and weibull below low_s, and of those above high_s."""
_HIGH_Z = NormalDist().inv_cdf(1 - TAIL)
_NORMAL = NormalDist()

BATCHES = "batches"
"""Names the stream of schedule.delays."""

Direction = Literal["weights", "samples"]


def quantile_s(config: DelayConfig, share: float) -> float:
    """Return the delay in seconds that `share` of the draws do not exceed, 0 < share < 1.

    high_s is a cut: from its share on every quantile is high_s. time_scale is applied.
    """
    return config.time_scale * _whole_s(config, share)


@dataclass(frozen=True, slots=True)
class DelayStream:
    """Draws the delays of one stream of messages. name: ASCII; seed: of the run."""

    config: DelayConfig
    seed: int
    name: str

    @classmethod
    def of(cls, config: ConfigTree, site: str, direction: Direction) -> Self:
        """Return the delays of what a site receives (weights) or sends (samples)."""
        sites = config.sites
        delays = sites.weight_delays if direction == "weights" else sites.sample_delays
        return cls(delays, config.run.seed, f"{site}/{direction}")

    def seconds(self, number: int) -> float:
        """Return the delay in seconds of message `number`, from 0 on."""
        if self.config.type == "none":
            return 0.0
        # 52 bits and a half: every value is a float, none is 0 or 1
        share = ((derived_seed(self.seed, f"delay/{self.name}", number) >> 11) + 0.5) / 2**52
        return quantile_s(self.config, share)


def batch_plan(schedule: ScheduleConfig, seed: int, updates: int) -> BatchPlan | None:
    """Return which version samples the batch of each update; None: that is not drawn.

    Update k's is max(0, k - d), d = max_staleness times the drawn delay over high_s, rounded.
    """
    if not schedule.drawn:
        return None
    config, most = schedule.delays, schedule.max_staleness
    delays = DelayStream(config, seed, BATCHES)
    old = (round(most * delays.seconds(update) / config.high_s) for update in range(updates))
    return BatchPlan(tuple(max(0, update - staleness) for update, staleness in enumerate(old)))


def _whole_s(config: DelayConfig, share: float) -> float:
    low_s, high_s = config.low_s, config.high_s
    match config.type:
        case "none":
            return 0.0
        case "constant":
            return low_s
        case "exponential":
            scale_s = (high_s - low_s) / -math.log(1 - INSIDE)
            return min(low_s - scale_s * math.log1p(-share), high_s)
        case "lognormal":
            low, high = math.log(low_s), math.log(high_s)
            sigma = (high - low) / (2 * _HIGH_Z)
            exponent = (low + high) / 2 + sigma * _NORMAL.inv_cdf(share)
            return high_s if exponent >= high else math.exp(exponent)
        case "weibull":
            # the hazards -ln(1 - p) at the two quantiles
            first, last = -math.log1p(-TAIL), -math.log(TAIL)
            inverse_shape = (math.log(high_s) - math.log(low_s)) / math.log(last / first)
            return min(high_s * (-math.log1p(-share) / last) ** inverse_shape, high_s)
