"""Totals of the servers, from rows."""

from megatron_opd.report.servers import ServerTotals, server_totals


def test_rollouts_and_tokens_are_added_up_and_the_last_version_counts():
    rows = [
        {"servers": {"a": {"version": 1, "rollouts": 2, "tokens": 20}}},
        {"servers": None},
        {
            "servers": {
                "a": {"version": None, "rollouts": 1, "tokens": 5},
                "b": {"version": 2, "rollouts": 0, "tokens": 0},
            }
        },
    ]
    assert server_totals(rows) == (ServerTotals("a", 3, 25, None), ServerTotals("b", 0, 0, 2))


def test_what_is_no_count_is_left_out():
    rows = [{"servers": [1]}, {"servers": {"a": 7, "b": {"rollouts": "x", "tokens": -3}}}, {}]
    assert server_totals(rows) == (ServerTotals("b", 0, 0, None),)
