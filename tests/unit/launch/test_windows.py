"""Ways to find room for one group, each by examples."""

import pytest

from megatron_opd.launch.windows import in_blocks, least_used, packed


@pytest.mark.parametrize(
    ("layout", "uses", "size", "found"),
    [
        (in_blocks, "10000000", 2, (2, 3)),
        (packed, "10000000", 2, (1, 2)),
        (in_blocks, "10000000", 4, (4, 5, 6, 7)),
        (in_blocks, "10000000", 3, (1, 2, 3)),
        (in_blocks, "11000000", 3, (4, 5, 6)),
        (in_blocks, "00000000", 6, (0, 1, 2, 3, 4, 5)),
        (in_blocks, "1000", 4, None),
        (packed, "01010", 2, (0, 2)),
        (packed, "01001", 2, (2, 3)),
        (packed, "0111", 2, None),
        (least_used, "2112", 2, (1, 2)),
        (least_used, "1111", 2, (0, 1)),
        (least_used, "2111", 2, (2, 3)),
        (least_used, "1", 2, None),
    ],
)
def test_the_group_that_is_found(layout, uses: str, size: int, found: tuple[int, ...] | None):
    assert layout([int(count) for count in uses], size, 0) == found
