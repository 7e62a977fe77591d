"""The limits of the first update's mismatch: which apply, and what is within them."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.first_update.recorded import recorded
from megatron_opd.config.schema import Config
from megatron_opd.metrics.mismatch_gap import Bound, MismatchGap, MismatchLimits
from megatron_opd.metrics.mismatch_limits import (
    EXACT,
    EXACT_FREE,
    HALF,
    HALF_FREE,
    QUANTISED,
    QUANTISED_FREE,
    TENSOR_FLOAT,
    limits_of,
    why_not,
)


def config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "data": {"train": "unused"},
        "teacher": {"model": "unused"},
        "student": {"model": "unused", "dtype": "float32"},
        "learner": {"dtype": "float32"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


REPLAY = {"routing_replay": "rollout"}
HALVES = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("sections", "experts", "gpu", "expected"),
    [
        ({}, False, False, EXACT),
        ({}, True, False, EXACT_FREE),
        ({"learner": REPLAY}, True, False, EXACT),
        ({}, False, True, TENSOR_FLOAT),
        ({"student": HALVES}, False, False, HALF),
        ({"learner": HALVES}, False, True, HALF),
        ({"student": HALVES}, True, False, HALF_FREE),
        ({"student": HALVES, "learner": REPLAY}, True, False, HALF),
        ({"student": {"quantization": "int8"}}, False, False, QUANTISED),
        ({"student": {"quantization": "fp8"}}, True, False, QUANTISED_FREE),
        ({"weight_sync": {"round_to": "int8"}}, False, False, QUANTISED),
        ({"learner": {"megatron": {"fp8": "hybrid"}}}, False, True, QUANTISED),
    ],
)
def test_which_limits_apply(
    sections: dict[str, Any], experts: bool, gpu: bool, expected: MismatchLimits
):
    assert limits_of(config(**sections), experts=experts, gpu=gpu) == expected


def test_a_server_that_rounds_by_an_extra_argument_has_the_limits_of_quantised_ones():
    assert limits_of(config(), ["kv_cache_dtype"], experts=False, gpu=False) == QUANTISED
    assert limits_of(config(), ["chunked_prefill_size"], experts=False, gpu=False) == EXACT


def test_a_lower_temperature_widens_the_limits_and_a_higher_one_does_not():
    cold = limits_of(config(rollout={"temperature": 0.5}), experts=False, gpu=False)
    assert cold == MismatchLimits(2 * EXACT.mean_abs_dp, 4 * EXACT.mean_k3_nats)
    assert limits_of(config(rollout={"temperature": 2.0}), experts=False, gpu=False) == EXACT


@pytest.mark.parametrize(
    ("sections", "settings", "words"),
    [
        ({"rollout": {"top_p": 0.9}}, [], "rollout.top_p is 0.9"),
        ({"weight_sync": {"round_to": "int3"}}, [], "weight_sync.round_to is int3"),
        ({"weight_sync": {"round_to": "int4"}}, [], "weight_sync.round_to is int4"),
        ({}, ["preferred_sampling_params"], "student.extra_args sets preferred_sampling_params"),
    ],
)
def test_what_cannot_be_compared_has_no_limits(
    sections: dict[str, Any], settings: list[str], words: str
):
    if "rollout" in sections:  # an importance ratio needs the whole distribution
        teacher = {"objective": {"type": "forward_kl"}, "support": {"type": "teacher_topk", "k": 8}}
        sections = sections | teacher
    made = config(**sections)
    assert (why_not(made, settings) or "").startswith(words)
    assert limits_of(made, settings, experts=False, gpu=False) is None


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 8)), min_size=1, max_size=40),
    st.floats(1e-6, 1),
    st.floats(1e-6, 1),
)
def test_both_means_must_be_within_limits(tokens: list[tuple[float, float]], dp: float, k3: float):
    gap = MismatchGap()
    for abs_dp, k3_nats in tokens:
        gap = gap.plus(MismatchGap(1, abs_dp, k3_nats))
    few = 1 + 64 / len(tokens)
    means = [math.fsum(column) / len(tokens) for column in zip(*tokens, strict=True)]
    if all(abs(mean - few * most) > 1e-9 for mean, most in zip(means, (dp, k3), strict=True)):
        assert MismatchLimits(dp, k3).allow(gap) == (means[0] <= few * dp and means[1] <= few * k3)


def test_no_token_is_no_reason_and_no_number_is_one():
    assert MismatchLimits(0.0, 0.0).allow(MismatchGap())
    for gap in (
        MismatchGap(9, math.nan, 0.0),
        MismatchGap(9, 0.0, math.nan),
        MismatchGap(9, math.inf, 0.0),
    ):
        assert not MismatchLimits(1.0, 1.0).allow(gap)


def test_updates_are_judged_together():
    bound = Bound(MismatchLimits(0.1, 1.0), before=MismatchGap(1000, 200.0, 0.0))
    assert not bound.allows(MismatchGap(1, 0.0, 0.0))
    assert Bound(bound.limits).allows(MismatchGap(1, 0.0, 0.0))


def test_one_token_of_a_healthy_mixture_that_is_far_off_is_no_alarm():
    """A |dp| as large as ever recorded, 0.87, beside what its other tokens had."""
    assert HALF_FREE.allow(MismatchGap(500, 0.87 + 499 * 0.016, 1.3 + 499 * 0.02))


def test_no_recorded_figure_is_a_false_alarm():
    found = recorded()
    assert len(found) > 400
    assert {each["limits"] for each in found} >= {
        f"{kind.mean_abs_dp:g}, {kind.mean_k3_nats:g} nats"
        for kind in (EXACT, EXACT_FREE, HALF, HALF_FREE, QUANTISED_FREE)
    }
    assert [each["name"] for each in found if not each["within"]] == []
    assert max(each["of_abs_dp"] for each in found) < 0.25, "headroom of a factor of four"
