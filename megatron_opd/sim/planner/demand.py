"""Holds the work that every candidate of a search is given: the same samples, in the same order.

With order admission, and without a sample that is dropped, batch j holds the samples (j - 1) B to
j B - 1 whatever the candidate is, and how long they are follows from the seed. So all candidates
train the same tokens between two updates, and the one that takes the fewest seconds is the fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_bridge.protocol import IntArray

DoubleArray = npt.NDArray[np.float64]
NumberArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Window:
    """Names the updates between whose ends the time is taken, counted from 1."""

    first: int = 6
    last: int = 14

    def updates(self, permits: int, batch_size: int) -> int:
        """Return how many updates to make so that none of the window's is short of prompts."""
        return self.last - 1 + -(-permits // batch_size)


@dataclass(frozen=True, slots=True)
class Requests:
    """Holds what N samples ask student servers for: R responses, or turns one after another.

    first_N: a sample's first request. start_R: tokens before what is sampled, of which given_R are
    in no request before. answer_s_R: seconds of the environment's answer.
    """

    first_N: IntArray
    start_R: IntArray
    given_R: IntArray
    sampled_R: IntArray
    answer_s_R: DoubleArray

    def summed(self, values: NumberArray) -> NumberArray:
        """Return the sums over each sample's requests, which are the last axis."""
        return np.add.reduceat(values, self.first_N, axis=-1)

    @property
    def per_sample(self) -> float:
        """Returns the mean number of requests of a sample."""
        return len(self.start_R) / len(self.first_N)


@dataclass(frozen=True, slots=True)
class Demand:
    """Holds the tokens of the first samples, given and sampled, int [N].

    These are at least the samples up to the window's last update, 0 to last * B - 1. requests: what
    they ask student servers for. plays: an environment answers them.
    """

    batch_size: int
    mini_batches: int
    window: Window
    prompt_N: IntArray
    response_N: IntArray
    requests: Requests
    plays: bool = False

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
