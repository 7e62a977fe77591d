"""docs/cases.md lists every check, study and benchmark."""

from tests.support.tools import exit_code


def test_the_list_of_cases_is_current():
    assert exit_code("case_table", "--check") == 0, "run: python tools/case_table.py"
