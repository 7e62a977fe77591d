"""docs/drops.md says what the code declares."""

from tests.support.tools import exit_code


def test_the_page_of_reasons_is_current():
    assert exit_code("drop_table", "--check") == 0, "run: python tools/drop_table.py"
