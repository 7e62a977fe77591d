"""Columns of a run, and what is left of long ones."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.report.series import number, points_of, table_of


def rows(values):
    return [{"update": i, "time_s": 2.0 * i, "loss": value} for i, value in enumerate(values)]


def test_nulls_and_missing_columns_are_no_numbers():
    table = table_of([{"update": 0, "loss": 1.5}, {"update": 1, "loss": None, "kl": 2}])
    assert table.values("loss").tolist() == [1.5]
    assert table.values("kl").tolist() == [2.0]
    assert math.isnan(table.columns["loss"][1])
    assert not table.has("reward_mean")
    assert np.isnan(table.time_s_R).all()


def test_columns_without_any_number_are_left_out():
    servers = {"a": {"tokens": 1}}
    table = table_of([{"update": 0, "servers": servers, "mark": "x", "on": True, "nothing": None}])
    assert set(table.columns) == {"update"}


def test_of_two_rows_of_one_update_the_later_one_counts():
    table = table_of(
        [{"update": 1, "loss": 5.0}, {"update": 0, "loss": 1.0}, {"update": 1, "loss": 7}]
    )
    assert table.update_R.tolist() == [0, 1]
    assert table.columns["loss"].tolist() == [1.0, 7.0]


@pytest.mark.parametrize("row", [{}, {"update": None}, {"update": True}, {"update": -1}])
def test_rows_of_no_update_are_left_out(row):
    assert len(table_of([row | {"loss": 1.0}])) == 0


@pytest.mark.parametrize("value", [None, True, "1", [1], 10**400, math.inf, math.nan])
def test_what_is_no_finite_number(value):
    assert math.isnan(number(value))


def test_short_columns_stay_as_they_are():
    points = points_of(table_of(rows([1.0, None, 3.0])))
    assert points.update_P == [0, 1, 2]
    assert points.time_s_P == [0, 2, 4]
    assert points.columns["loss"] == [1.0, None, 3.0]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(-999, 999)), min_size=21, max_size=300),
    st.sampled_from([4, 10, 20]),
)
def test_long_columns_keep_their_extremes_bin_by_bin(values, most):
    table = table_of([*rows(values), {"update": len(values), "time_s": 0.0, "loss": 0}])
    points = points_of(table, most)
    loss = points.columns["loss"]
    assert len(loss) == len(points.update_P) == len(points.time_s_P) == most
    assert list(points.update_P) == sorted(points.update_P)
    for low in range(0, most, 2):
        first, last = (int(update) for update in points.update_P[low : low + 2])
        inside = [v for v in [*values, 0][first : last + 1] if v is not None]
        if not inside:
            assert loss[low : low + 2] == [None, None]
            continue
        assert sorted(loss[low : low + 2]) == [min(inside), max(inside)]
        if min(inside) < max(inside):
            order = inside.index(min(inside)) < inside.index(max(inside))
            assert (loss[low] < loss[low + 1]) is order


def test_a_spike_of_one_update_survives():
    points = points_of(table_of(rows([1.0] * 5000 + [99.0] + [1.0] * 5000)), 100)
    assert max(points.columns["loss"]) == 99.0
    assert points.update_P[0] == 0
    assert points.update_P[-1] == 10_000


def test_six_digits_are_kept():
    assert points_of(table_of(rows([0.123456789]))).columns["loss"] == [0.123457]
