"""The course of the learning rate."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.config.learner import OptimizerConfig
from megatron_opd.learner.learning_rate import learning_rate


@given(st.integers(0, 20), st.integers(1, 60), st.sampled_from(["constant", "cosine"]))
def test_it_warms_up_to_the_peak_and_ends_where_its_course_ends(
    warmup: int, updates: int, schedule: str
):
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=warmup, lr_scheduler=schedule)
    rates = [learning_rate(config, update, updates) for update in range(updates)]
    assert all(0 < rate <= 1e-3 for rate in rates), "no update is wasted at 0"
    rising, rest = rates[: warmup + 1], rates[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rising))
    if rest:
        assert rest[0] == pytest.approx(1e-3)
        assert all(a >= b for a, b in itertools.pairwise(rest))
    if len(rest) > 1:
        assert rest[-1] == pytest.approx(1e-3 if schedule == "constant" else 1e-4)
