"""docs/metric_dictionary.md says what the catalogue says."""

from tests.support.tools import exit_code


def test_the_dictionary_is_current():
    assert exit_code("metrics_reference", "--check") == 0, "run: python tools/metrics_reference.py"
