"""What a verifier may return."""

import math

import numpy as np
import pytest

from megatron_opd.data.verifiers.reward import VerifierFailed, checked_reward
from megatron_opd.records.drops import VERIFIER_BAD_REWARD


@pytest.mark.parametrize(
    ("judgement", "reward"),
    [
        *((True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0), (0.25, 0.25)),
        *((np.True_, 1.0), (np.float32(0.5), 0.5), (np.array([0.5]), 0.5), (np.int64(1), 1.0)),
    ],
)
def test_a_bool_or_a_number_in_range_is_a_reward(judgement, reward):
    found = checked_reward(judgement)
    assert (found, type(found)) == (reward, float)


class Hostile:
    """Claims to be in range and cannot be shown."""

    def __le__(self, other):
        return True

    __ge__ = __le__


@pytest.mark.parametrize(
    "judgement",
    [
        *(None, "1", b"1", 2.0, 2, -0.1, math.nan, math.inf, -math.inf, 1j, [1], {}, Hostile()),
        *(np.float32("nan"), np.array([0.5, 0.5]), np.array([]), np.str_("x"), 10**400),
    ],
)
def test_anything_else_is_a_counted_failure(judgement):
    with pytest.raises(VerifierFailed) as caught:
        checked_reward(judgement)
    assert caught.value.reason == VERIFIER_BAD_REWARD
    assert len(str(caught.value)) < 200
