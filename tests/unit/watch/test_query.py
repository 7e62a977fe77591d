"""What a page may ask for, and the line that refuses anything else."""

import pytest

from megatron_opd.watch.query import (
    BadQuery,
    Filters,
    Page,
    columns_query,
    lanes_query,
    rollouts_query,
)


def test_nothing_asked_is_the_newest_fifty():
    assert rollouts_query({}) == (Filters(), Page(0, 50))


def test_every_filter_is_read():
    filters, page = rollouts_query(
        {
            "update_min": "2",
            "reward_max": "0.5",
            "staleness_min": "1",
            "outcome": "dropped",
            "drop_reason": "nan",
            "teacher": "big",
            "text": "ABC",
            "sort": "gap",
            "order": "ascending",
            "upto": "9",
            "offset": "3",
            "limit": "4",
        }
    )
    assert filters == Filters(
        update_min=2.0,
        reward_max=0.5,
        staleness_min=1.0,
        outcome="dropped",
        drop_reason="nan",
        teacher="big",
        text="abc",
        sort="gap",
        descending=False,
        upto=9,
    )
    assert page == Page(3, 4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"limit": "201"}, "limit must be a whole number from 1 to 200, got '201'"),
        ({"limit": "0"}, "limit must be"),
        ({"offset": "-1"}, "offset must be"),
        ({"upto": "1e3"}, "upto must be"),
        ({"reward_min": "nan"}, "reward_min must be a number"),
        ({"update_max": "two"}, "update_max must be a number from -1e[+]15 to 1e[+]15, got 'two'"),
        ({"sort": "size"}, "sort must be one of update, reward"),
        ({"outcome": "lost"}, "outcome must be one of trained, dropped"),
        ({"text": "x" * 1001}, "text must have at most 1000 characters"),
        ({"where": "1"}, "unknown parameter 'where'"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, str], words: str):
    with pytest.raises(BadQuery, match=words):
        rollouts_query(given)


def test_columns_are_bounded():
    assert columns_query({"columns": "loss,,kl"}) == ("loss", "kl")
    with pytest.raises(BadQuery, match="columns must name at most 64, got 65"):
        columns_query({"columns": ",".join("a" * 65)})


def test_lanes_have_a_begin_before_their_end():
    assert lanes_query({"from_s": "1.5", "to_s": "2"}) == (1.5, 2.0, 600)
    with pytest.raises(BadQuery, match="from_s must be below to_s, got 2 and 2"):
        lanes_query({"from_s": "2", "to_s": "2"})
    with pytest.raises(BadQuery, match="bins must be"):
        lanes_query({"bins": "9999999"})
