"""Weights of teachers: which are refused, in which words, and who is asked."""

import math

import pytest

from megatron_opd.records.mixtures import label_of, shares_fault, shares_of, weights_fault


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"math": 0.7, "code": 0.3}, None),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, None),
        ({"math": 1, "code": 0}, None),
        ({"math": 0.7, "code": 0.3 + 9e-7}, None),
        ({"math": 0.7, "code": 0.3 + 2e-6}, "sum to 1, got 1.000002; write {math: 0.6999986"),
        ({"math": 3, "code": 1}, "sum to 1, got 4; write {math: 0.75, code: 0.25}"),
        ({"math": 1.5, "code": -0.5}, "finite and >= 0, got code: -0.5"),
        ({"math": math.nan, "code": 1}, "finite and >= 0, got math: nan"),
        ({"math": math.inf}, "finite and >= 0, got math: inf"),
        ({"math": 0, "code": 0}, "no weight above 0"),
        ({}, "no weight above 0"),
    ],
)
def test_weights(weights, said):
    fault = weights_fault(weights)
    assert fault is None if said is None else said in fault


def test_who_is_asked():
    assert shares_of({"math": 0.7, "code": 0.3, "law": 0}) == (("code", 0.3), ("math", 0.7))
    assert shares_of({"math": 1, "code": 0}) == (("math", 1.0),)
    shares = shares_of({"a": 0.333333, "b": 0.333333, "c": 0.333333})
    assert math.fsum(weight for _, weight in shares) == pytest.approx(1, abs=1e-15)
    assert label_of((("code", 0.3), ("math", 0.7))) == "code:0.3+math:0.7"
    assert label_of((("math", 1.0),)) == "math"


@pytest.mark.parametrize(
    "shares",
    [
        (("math", 1.0),),
        (("math", 0.7), ("code", 0.3)),
        (("code", 0.5), ("code", 0.5)),
        (("code", 0.3), ("math", 0.6)),
        (("code", 0.0), ("math", 1.0)),
        (("code", -0.3), ("math", 1.3)),
        (("code", math.nan), ("math", 0.5)),
    ],
)
def test_shares_that_cannot_be(shares):
    assert shares_fault(shares) is not None
    assert shares_fault(()) is None
    assert shares_fault((("code", 0.3), ("math", 0.7))) is None
