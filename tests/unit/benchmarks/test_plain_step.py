import pytest

from benchmarks.plain_step import added

FIGURES = {
    # the first step of each kind is not timed
    "step_s_of_each": {
        "distil": [99.0, 13.0, 11.0, 12.0],
        "packed": [99.0, 10.0, 10.0, 10.0],
        "stock": [99.0, 8.0, 8.0, 8.0],
    },
    "head_product_s": {"all": [1.0, 1.0, 1.0], "responses": [0.5, 0.5, 0.5]},
    "bookkeeping_s_of_each": [9.0, 0.1, 0.3],
}


def test_ratios_are_those_of_medians_after_the_first_step():
    found = added(FIGURES)
    assert found["step_s"] == {"distil": 12.0, "packed": 10.0, "stock": 8.0}
    assert found["distil_over_packed"] == pytest.approx(1.2)
    assert found["distil_over_stock"] == pytest.approx(1.5)


def test_the_recomputed_product_is_taken_off_once():
    found = added(FIGURES)
    assert found["recomputed_head_product"] == pytest.approx(0.05)
    assert found["distil_over_packed_without_recomputing"] == pytest.approx(1.15)


def test_what_is_added_besides_the_head_takes_off_each_side_s_own_products():
    # (12 - 4 * 0.5) - (10 - 3 * 1) of 10
    assert added(FIGURES)["added_besides_head"] == pytest.approx(0.3)


def test_bookkeeping_is_a_share_of_the_plain_step():
    assert added(FIGURES)["packing_and_metrics"] == pytest.approx(0.02)
