"""docs/configuration.md says what the schema says."""

from tests.support.tools import exit_code


def test_the_reference_page_is_current():
    assert exit_code("config_reference", "--check") == 0, "run: python tools/config_reference.py"
