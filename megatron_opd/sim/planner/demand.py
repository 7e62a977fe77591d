"""Holds the work that every candidate of a search is given: the same samples, in the same order.

With order admission, and without a sample that is dropped, batch j holds the samples (j - 1) B to
j B - 1 whatever the candidate is, and how long they are follows from the seed. So all candidates
train the same tokens between two updates, and the one that takes the fewest seconds is the fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_opd.config.schema import Config
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.sim.costs import Lengths
from megatron_opd.sim.lengths import LengthDraws
from sglang_bridge.protocol import IntArray

DoubleArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """Names the updates between whose ends the time is taken, counted from 1."""

    first: int = 6
    last: int = 14

    def updates(self, permits: int, batch_size: int) -> int:
        """Return how many updates to make so that none of the window's is short of prompts."""
        return self.last - 1 + -(-permits // batch_size)


@dataclass(frozen=True, slots=True)
class Demand:
    """Holds the tokens of prompt and response of the first samples, int [N].

    These are at least the samples up to the window's last update, 0 to last * B - 1.
    """

    batch_size: int
    mini_batches: int
    window: Window
    prompt_N: IntArray
    response_N: IntArray

    @property
    def tokens(self) -> int:
        """Returns the response tokens that are trained in the window."""
        start, stop = self.window.first * self.batch_size, self.window.last * self.batch_size
        return int(self.response_N[start:stop].sum())

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest sample."""
        return int((self.prompt_N + self.response_N).max())

    @property
    def mean(self) -> int:
        """Returns the tokens of the average sample, rounded up."""
        return math.ceil(float((self.prompt_N + self.response_N).mean()))

    def batch(self, update: int) -> list[int]:
        """Return the tokens of the samples of an update, counted from 1."""
        stop = update * self.batch_size
        start = stop - self.batch_size
        return (self.prompt_N[start:stop] + self.response_N[start:stop]).tolist()


def demand_of(config: Config, lengths: Lengths, window: Window, ahead: int = 0) -> Demand:
    """Return what a simulation of `config` samples (sim/world.py draws the same).

    ahead: batches beyond the window's last update, which are admitted before its end.
    """
    draws = LengthDraws(lengths, config.rollout.max_new_tokens, config.simulation.seed)
    seeds = [
        derived_seed(config.run.seed, ROLLOUT, uid)
        for uid in range((window.last + ahead) * config.buffer.batch_size)
    ]
    return Demand(
        batch_size=config.buffer.batch_size,
        mini_batches=config.learner.num_mini_batches,
        window=window,
        prompt_N=np.array([draws.prompt(seed) for seed in seeds], np.int32),
        response_N=np.array([draws.response(seed)[0] for seed in seeds], np.int32),
    )
