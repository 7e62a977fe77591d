"""Bounds from below how long student servers need for responses, whatever runs beside what.

With x the time that a token adds to its decode step (a for its request, c for each token in its
cache) and s what a step takes besides, a step of the requests i = 1..n takes d = s + sum_i x_i.
Where S servers work for a time T, and no more than M requests run at once but for H request-seconds
in which some of these M certainly do not run,

    T (S + l M) - l H >= sum over steps of d (1 + l n)        for every l >= 0
                      >= sum over tokens of (s / n + x) (1 + l n)
                      >= sum over tokens of (sqrt(l s) + sqrt(x))^2,

the least that any n makes of it. The KV cache has room for C tokens, of which request i takes r_i
from its beginning, so with R = sum_i r_i <= C

    T S (1 + l C) >= sum over steps of d (1 + l R) >= sum over tokens of (sqrt(l s r) + sqrt(x))^2.

A turn of a trajectory is a request of its own, of which no two of a trajectory run at once. Both
hold for every l; the largest of several is taken. A prefill gives a request a token too, at
most once for each version that samples it, which is why `spare` tokens are left out.
"""

from __future__ import annotations

import numpy as np

from megatron_opd.sim.costs import EngineCost
from megatron_opd.sim.planner.demand import Demand, DoubleArray

BATCHES = 2.0 ** np.arange(-1.0, 14.0, 0.5)
"""Requests of a server for which l is right, when they are all alike."""


class SamplingBounds:
    """Sums the least times of one kind of student server. spare: tokens of a response left out.

    Axes: L values of l, N samples, R requests of them: a response, or turns.
    """

    def __init__(self, cost: EngineCost, demand: Demand, spare: int) -> None:
        self._cost = cost
        asked = demand.requests
        start_R, sampled_R = asked.start_R.astype(np.float64), asked.sampled_R.astype(np.float64)
        decoded_R = np.maximum(0.0, sampled_R - 1 - spare)
        grown_R = decoded_R * start_R + decoded_R * (decoded_R + 1) / 2
        added_R = decoded_R * cost.step_request_s + grown_R * cost.step_cached_token_s
        cached = np.arange(demand.longest + 1, dtype=np.float64)
        roots = np.cumsum(np.sqrt(cost.step_request_s + cached * cost.step_cached_token_s))
        roots_R = roots[asked.start_R + decoded_R.astype(np.int64)] - roots[asked.start_R]
        prefill_R = cost.request_s + asked.given_R * cost.prefill_token_s
        self._beside_N = asked.summed(prefill_R + added_R)
        served_R = prefill_R + decoded_R * cost.step_s + added_R
        self.alone_N: DoubleArray = asked.summed(served_R + asked.answer_s_R)
        """Seconds of each sample on a server of its own, and of its environment's answers."""
        tokens, added_s = max(1.0, float(decoded_R.sum())), float(added_R.sum())
        each_s = max(added_s / tokens, 1e-9 * cost.step_s)

        def sums(weight_L: DoubleArray, taken_R: DoubleArray) -> DoubleArray:
            held_LR = weight_L[:, None] * (cost.step_s * taken_R)
            least_LR = held_LR * decoded_R + added_R + 2 * np.sqrt(held_LR) * roots_R + prefill_R
            return np.pad(np.cumsum(asked.summed(least_LR), axis=1), ((0, 0), (1, 0)))

        self._weight_L = cost.step_s / (each_s * BATCHES**2)
        self._sums_L = sums(self._weight_L, np.ones_like(start_R))
        self._room: float | None = None
        if cost.cache_tokens is not None:
            room_R = start_R + sampled_R
            # a request beyond the cache runs alone
            self._room = max(cost.cache_tokens, float(room_R.max()))
            self._room_weight_L = self._weight_L / float(room_R.mean()) ** 2 * room_R.mean()
            self._room_sums_L = sums(self._room_weight_L, room_R)

    def added_s(self, first: int, stop: int) -> float:
        """Return what samples first..stop-1 add to the steps of their servers."""
        return float(self._beside_N[first:stop].sum())

    def seconds(
        self, first: int, stop: int, servers: int, slots: int, permits: int, held_s: float
    ) -> float:
        """Return the least time for samples first..stop-1.

        slots: rollouts in flight at once. permits, held_s: samples with a permit, and the
        request-seconds (H above) in which some of them are trained or synced.
        """
        busy = min(servers, slots)
        total_L = self._sums_L[:, stop] - self._sums_L[:, first]
        most = min(slots, busy * self._cost.max_running)
        least_s = float((total_L / (busy + self._weight_L * most)).max())
        if held_s > 0:
            shared_L = total_L + self._weight_L * held_s
            least_s = max(least_s, float((shared_L / (busy + self._weight_L * permits)).max()))
        if self._room is None:
            return least_s
        total_L = self._room_sums_L[:, stop] - self._room_sums_L[:, first]
        roomy_L = total_L / (busy * (1 + self._room_weight_L * self._room))
        return max(least_s, float(roomy_L.max()))
