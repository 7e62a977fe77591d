"""Draws how long prompts, responses and turns are: a function of the request's seed.

A response that is sampled anew, because a weight sync aborted it or its server was lost, therefore
has the length that it had, and a trajectory its turns.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from megatron_opd.records.seeds import derived_seed
from megatron_opd.sim.costs import Lengths, LognormalLengths, RecordedLengths, TurnLength

LENGTH, TURNS, ANSWER = "length", "turns", "answer"
_SEEDS = 2**63
LONGEST_ANSWER = 1000.0
"""Largest answer that is drawn, in means: a normal draw may be beyond what floats are."""


class LengthDraws:
    """Draws lengths. max_new_tokens: of a response or turn; longer ones are cut off.

    seed: of the draws. max_turns: of a trajectory; more are not drawn.
    """

    def __init__(
        self, lengths: Lengths, max_new_tokens: int, seed: int, max_turns: int = 1
    ) -> None:
        self._lengths, self._longest, self._seed = lengths, max_new_tokens, seed
        self._most_turns = max_turns
        if isinstance(lengths, LognormalLengths):
            self._tokens = Lognormal(lengths.mean, lengths.cv)
            if lengths.turns is not None:
                self._turns = Lognormal(lengths.turns.mean, lengths.turns.cv)
                self._answers = Lognormal(1.0, lengths.turns.answer_cv)
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

    def trajectory(self, seed: int) -> tuple[TurnLength, ...]:
        """Return the turns of the trajectory that begins with this seed's request."""
        lengths = self._lengths
        if isinstance(lengths, RecordedLengths):
            return lengths.trajectories[self._drawn(LENGTH, seed) % len(lengths.trajectories)]
        turns = lengths.turns
        assert turns is not None, "lengths of an environment have turns"
        count = round(self._turns.at(self._share(TURNS, seed), self._most_turns))
        return tuple(
            TurnLength(
                turns.given_tokens if number else lengths.prompt_tokens,
                self.response(self._drawn(TURNS, seed, number) if number else seed)[0],
                turns.answer_s
                * self._answers.at(self._share(ANSWER, seed, number), LONGEST_ANSWER),
            )
            for number in range(max(1, count))
        )

    def _wanted(self, request_seed: int) -> int:
        if isinstance(self._lengths, RecordedLengths):
            return self._pair(self._lengths, request_seed)[1]
        return round(self._tokens.at(self._share(LENGTH, request_seed), 2.0 * self._longest))

    def _pair(self, lengths: RecordedLengths, request_seed: int) -> tuple[int, int]:
        return lengths.pairs[self._drawn(LENGTH, request_seed) % len(lengths.pairs)]

    def _drawn(self, kind: str, *index: int) -> int:
        return derived_seed(self._seed, kind, *index)

    def _share(self, kind: str, *index: int) -> float:
        return (self._drawn(kind, *index) + 0.5) / _SEEDS


class Lognormal:
    """Holds a lognormal distribution. cv: standard deviation over mean; 0: all are alike."""

    def __init__(self, mean: float, cv: float) -> None:
        variance = math.log1p(cv**2)
        self._mean, self._sigma = mean, math.sqrt(variance)
        self._mu = math.log(mean) - variance / 2
        self._normal = NormalDist()

    def at(self, share: float, most: float) -> float:
        """Return the value below which this share lies, or `most` if it is less."""
        if not self._sigma:
            return min(self._mean, most)
        # the exponent of a draw beyond the largest value may be larger than floats are
        exponent = self._mu + self._sigma * self._normal.inv_cdf(share)
        return math.exp(min(exponent, math.log(most)))
