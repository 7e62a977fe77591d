"""Which delays are refused, each in one line that names its key."""

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_opd.config.delays import DelayConfig


def refusal(**keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        DelayConfig.model_validate(keys)
    (error,) = caught.value.errors()
    return error["msg"]


@pytest.mark.parametrize("kind", ["none", "constant", "lognormal", "weibull", "exponential"])
def test_the_smallest_delay_is_no_larger_than_the_largest(kind: str):
    assert "low_s must be <= high_s, got 70 and 60" in refusal(type=kind, low_s=70.0, high_s=60.0)


@pytest.mark.parametrize("kind", ["lognormal", "weibull"])
@pytest.mark.parametrize(("low_s", "high_s"), [(0.0, 60.0), (60.0, 60.0)])
def test_two_quantiles_need_two_positive_ends(kind: str, low_s: float, high_s: float):
    said = refusal(type=kind, low_s=low_s, high_s=high_s)
    assert f"low_s must be > 0 and < high_s with type {kind}" in said
    assert f"got {low_s:g} and {high_s:g}" in said


@pytest.mark.parametrize("kind", ["constant", "exponential"])
def test_one_parameter_needs_one_end(kind: str):
    for low_s, high_s in ((0.0, 60.0), (60.0, 60.0)):
        DelayConfig.model_validate({"type": kind, "low_s": low_s, "high_s": high_s})


@pytest.mark.parametrize("time_scale", [0.0, 1.5, -1.0])
def test_time_scale_only_shortens(time_scale: float):
    refusal(time_scale=time_scale)
