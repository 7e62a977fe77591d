"""The header Retry-After: seconds, or a date of HTTP."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.retry_after import retry_after_s

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        (" 17 ", 17.0),
        ("Sun, 29 Nov 2026 12:00:30 GMT", 30.0),
        ("Sun, 29 Nov 2026 13:01:00 +0100", 60.0),
        ("Sun, 29 Nov 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("-3", None),
        ("1e9", None),
        ("", None),
        ("\u0661\u0667", None),
    ],
)
def test_seconds_and_dates(value: str | None, seconds: float | None):
    assert retry_after_s(value, NOW) == seconds


@given(st.text(max_size=60))
def test_whatever_stands_there_is_a_time_or_none(value: str):
    found = retry_after_s(value, NOW)
    assert found is None or found >= 0


def test_many_digits_are_a_long_time():
    assert retry_after_s("9" * 5000, NOW) == float("9" * 18)
