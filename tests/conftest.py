"""Settings of every test, how two workers share them, and the table of measured errors."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.figures import FIGURES, merge

# A busy machine is slow, not wrong.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
torch.set_num_threads(1)  # another worker, or a server, needs the other core

TESTS = Path(__file__).parent
SERVERS = "servers"  # of the tests that share the session's two SGLang servers
ORDER = ("e2e", "dist")  # the longest first; whatever else is there fills the other worker


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs every test with servers, in order; a file's tests stay together."""

    def kind(item: pytest.Item) -> str:
        return item.path.relative_to(TESTS).parts[0]

    items.sort(key=lambda item: ORDER.index(kind(item)) if kind(item) in ORDER else len(ORDER))
    for item in items:
        group = SERVERS if kind(item) == "e2e" else str(item.path.relative_to(TESTS))
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["figures"] = {name: asdict(figure) for name, figure in FIGURES.items()}


class FromWorkers:
    """Collects what the workers of a divided run measured."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, figure in getattr(node, "workeroutput", {}).get("figures", {}).items():
            merge(name, **figure)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FromWorkers())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FIGURES:
        return
    terminalreporter.section("measured errors (worst of n, limit)")
    width = max(map(len, FIGURES))
    for name, figure in sorted(FIGURES.items()):
        terminalreporter.write_line(
            f"{name:{width}}  {figure.worst:9.2e}  of {figure.times:4d}  < {figure.limit:.0e}"
        )
