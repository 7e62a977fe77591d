"""Decides which responses a term of the loss reads, and how much each of them weighs.

A term from rewards weighs a response by reward_weight_B, every other term by teacher_weight_B. A
response of weight 0 is not there for the term: neither its statistics nor a teacher score that was
never asked for (NaN) can reach it. One that no term reads does not count in the loss's mean.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, TypeVar

import torch

from megatron_opd.columns import GroupColumns
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objective import Objective
from megatron_opd.losses.cache import Cache, Unscored

Array = TypeVar("Array", bound=Any)
"""Stands for a numpy array, or a tensor in a loss."""


def weight_of(objective: Objective, groups: GroupColumns[Array]) -> Array:
    """Return float [B], what a term of this objective is multiplied with on each response."""
    return groups.reward_weight_B if objective.reads_reward else groups.teacher_weight_B


def read_by_any(estimator: Estimator, groups: GroupColumns[Array]) -> Array:
    """Return bool [B], the responses that some term reads."""
    return reduce(or_, [weight_of(o, groups) > 0 for o in estimator.objectives])


def counted(estimator: Estimator, draws: Unscored) -> tuple[int, int]:
    """Return the response tokens and the responses that the loss's mean is over."""
    read_B = read_by_any(estimator, draws)
    return int(read_B[draws.sample_T].sum()), int(read_B.sum())


def taught(estimator: Estimator, cache: Cache) -> Cache:
    """Return the responses whose teacher scores are read."""
    readers = [objective for objective in estimator.objectives if objective.reads_teacher]
    none_B = torch.zeros_like(cache.teacher_weight_B, dtype=torch.bool)
    kept_B = reduce(torch.logical_or, [weight_of(o, cache) > 0 for o in readers], none_B)
    return cache.of_responses(kept_B)
