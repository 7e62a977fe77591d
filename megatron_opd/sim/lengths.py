"""Draws how long prompts and responses are: a function of the request's seed, whichever try it is.

A response that is sampled anew, because a weight sync aborted it or its server was lost, therefore
has the length that it had.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from megatron_opd.records.seeds import derived_seed
from megatron_opd.sim.costs import Lengths, LognormalLengths, RecordedLengths

LENGTH = "length"
_SEEDS = 2**63


class LengthDraws:
    """Draws lengths. max_new_tokens: of a response; longer ones are cut off. seed: of the draws."""

    def __init__(self, lengths: Lengths, max_new_tokens: int, seed: int) -> None:
        self._lengths, self._longest, self._seed = lengths, max_new_tokens, seed
        self._normal = NormalDist()
        if isinstance(lengths, LognormalLengths):
            variance = math.log1p(lengths.cv**2)
            self._sigma = math.sqrt(variance)
            self._mu = math.log(lengths.mean) - variance / 2
        elif not lengths.pairs:
            raise ValueError("recorded lengths must hold at least one (prompt, response), got none")

    def prompt(self, request_seed: int) -> int:
        """Return the tokens of the prompt of a request with this seed."""
        if isinstance(self._lengths, RecordedLengths):
            return self._pair(self._lengths, request_seed)[0]
        return self._lengths.prompt_tokens

    def response(self, request_seed: int) -> tuple[int, bool]:
        """Return the tokens of its response, at least one, and whether it was cut off."""
        wanted = self._wanted(request_seed)
        return max(1, min(wanted, self._longest)), wanted >= self._longest

    def _wanted(self, request_seed: int) -> int:
        if isinstance(self._lengths, RecordedLengths):
            return self._pair(self._lengths, request_seed)[1]
        if not self._sigma:
            return round(self._lengths.mean)
        share = (derived_seed(self._seed, LENGTH, request_seed) + 0.5) / _SEEDS
        # the exponent of a draw beyond the longest response may be larger than floats are
        exponent = self._mu + self._sigma * self._normal.inv_cdf(share)
        return round(math.exp(min(exponent, math.log(2.0 * self._longest))))

    def _pair(self, lengths: RecordedLengths, request_seed: int) -> tuple[int, int]:
        return lengths.pairs[derived_seed(self._seed, LENGTH, request_seed) % len(lengths.pairs)]
