"""Settings of every test, and the table of measured errors after the tests' own report."""

import pytest
from hypothesis import settings

from tests.figures import FIGURES

# A busy machine is slow, not wrong.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FIGURES:
        return
    terminalreporter.section("measured errors (worst of n, limit)")
    width = max(map(len, FIGURES))
    for name, figure in sorted(FIGURES.items()):
        terminalreporter.write_line(
            f"{name:{width}}  {figure.worst:9.2e}  of {figure.times:4d}  < {figure.limit:.0e}"
        )
