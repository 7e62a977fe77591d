"""Decides which responses a term of the loss reads, and how much each of them weighs.

A term from rewards weighs a response by reward_weight_B, one that learns what the teacher wrote by
imitation_weight_B, every other term by teacher_weight_B. A
response of weight 0 is not there for the term: neither its statistics nor a teacher score that was
never asked for (NaN) can reach it. One that no term reads does not count in the loss's mean.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objective import Objective
from megatron_opd.losses.cache import Cache, Unscored

Array = TypeVar("Array", bound=Any, covariant=True)
"""Stands for a numpy array, or a tensor in a loss."""


class ResponseWeights(Protocol[Array]):
    """Names what terms of the loss weigh responses by; see columns.GroupColumns."""

    @property
    def reward_weight_B(self) -> Array:
        """Returns what multiplies the terms from rewards."""
        ...

    @property
    def teacher_weight_B(self) -> Array:
        """Returns what multiplies the other terms."""
        ...

    @property
    def imitation_weight_B(self) -> Array:
        """Returns what multiplies the terms that learn what the teacher wrote."""
        ...


def weight_of(objective: Objective, groups: ResponseWeights[Array]) -> Array:
    """Return float [B], what a term of this objective is multiplied with on each response."""
    if objective.imitates:
        return groups.imitation_weight_B
    return groups.reward_weight_B if objective.reads_reward else groups.teacher_weight_B


def read_by_any(estimator: Estimator, groups: ResponseWeights[Array]) -> Array:
    """Return bool [B], the responses that some term reads."""
    return reduce(or_, [weight_of(o, groups) > 0 for o in estimator.objectives])


def counted(estimator: Estimator, draws: Unscored) -> tuple[int, float]:
    """Return the sampled tokens and the samples, or parts of them, that the loss's mean is over."""
    host = draws.on_host
    read_B: Any = read_by_any(estimator, host)
    return int(read_B[host.sample_T].sum()), float(host.share_B[read_B].sum())


def taught(estimator: Estimator, cache: Cache) -> Cache:
    """Return the responses whose teacher scores are read."""
    readers = [objective for objective in estimator.objectives if objective.reads_teacher]
    host = cache.on_host
    none_B = np.zeros(len(host.teacher_weight_B), dtype=np.bool_)
    return cache.of_responses(reduce(or_, [weight_of(o, host) > 0 for o in readers], none_B))
