"""What two runs have in common, and what does not count."""

import math
from typing import Any

import pytest

from megatron_opd.metrics.compare import compare_rows, is_of_time


def row(**values: Any) -> dict[str, Any]:
    return {"update": 0, "loss": 0.5, "reward_mean": None, "time_s": 1.0} | values


def test_time_memory_and_queues_do_not_count():
    free = {"peak_rss_bytes": 5, "tokens_per_s": 1.0, "unix_time_s": 2.0, "rolling_samples": 3}
    free |= {"servers": {"http://a:1": {"version": 3}}, "turn_cached_fraction": 0.5}
    free |= {"environment_s_mean": 0.1, "site_delay_s_max": 2.0}
    found = compare_rows([row(**free)], [row(**dict.fromkeys(free, -1), time_s=9.0)])
    assert found.differences == ()
    assert set(found.left_out) == {*free, "time_s"}
    assert set(found.columns) == {"update", "loss", "reward_mean"}
    assert not is_of_time("num_ids")


def test_a_difference_is_the_largest_and_says_where_it_began():
    a = [row(update=i, loss=0.5, ratio_max=1.0) for i in range(4)]
    b = [dict(each) for each in a]
    b[1]["ratio_max"] = 1.0 + 1e-9
    b[2]["loss"], b[3]["loss"] = 0.25, 0.499
    b[3]["reward_mean"] = 0.1
    found = compare_rows(a, b)
    assert [each.column for each in found.differences] == ["ratio_max", "loss", "reward_mean"]
    loss = found.differences[1]
    assert (loss.first_update, loss.updates, loss.relative) == (2, 2, 0.5)
    assert math.isinf(found.differences[2].relative), "a number is no null"
    assert [each.column for each in found.beyond(1e-8)] == ["loss", "reward_mean"]


def test_a_column_that_one_run_lacks_is_a_difference():
    found = compare_rows([row(new=1)], [row()])
    assert [each.column for each in found.differences] == ["new"]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 10**400, "0.5", [0.5], None])
def test_what_is_no_finite_number_differs_from_one(odd: Any):
    [found] = compare_rows([row(loss=odd)], [row()]).differences
    assert found.column == "loss"
    assert math.isinf(found.relative)
    assert compare_rows([row(loss=odd)], [row(loss=odd)]).differences == ()
    assert compare_rows([row(loss=odd)], [row(loss="other")]).differences != ()


def test_integers_beyond_float64_are_compared_whole():
    [found] = compare_rows([row(loss=2**60)], [row(loss=2**60 + 1)]).differences
    assert found.relative == 2**-60


@pytest.mark.parametrize(("one", "other"), [(0.0, math.nan), (True, 1), (False, 0.0)])
def test_values_of_other_kinds_differ(one: Any, other: Any):
    """Before: ZeroDivisionError for the first, equal for the others."""
    for a, b in ((one, other), (other, one)):
        (found,) = compare_rows([row(loss=a)], [row(loss=b)]).differences
        assert found.relative == math.inf


def test_health_which_is_measured_beside_a_run_is_left_out():
    one = [row(health_topk_overlap=0.5, health_update=0), row()]
    found = compare_rows(one, [row(), row(health_topk_overlap=0.6)])
    assert found.differences == ()
    assert {"health_topk_overlap", "health_update"} <= set(found.left_out)
