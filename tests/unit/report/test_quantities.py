"""Numbers as readers see them."""

import pytest

from megatron_opd.report.quantities import duration, percent, plain, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12, "12"),
        (1234567, "1,234,567"),
        (0.123456, "0.123"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (1e-7, "1.00e-07"),
        (123456.7, "1.23e+05"),
        (-0.5, "-0.500"),
    ],
)
def test_plain(value, text):
    assert plain(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 %"), (0.034, "3.4 %"), (0.67, "67 %"), (1, "100 %")]
)
def test_percent(value, text):
    assert percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.25, "250 ms"),
        (2.5, "2.50 s"),
        (61, "1 min 1 s"),
        (1800, "30 min"),
        (3660, "1 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_duration(value, text):
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(999, "999 bytes"), (1500, "1.50 kB"), (6.68e9, "6.68 GB")]
)
def test_size(value, text):
    assert size(value) == text
