"""Settings of every test, how two workers share them, and the table of measured errors."""

import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support import suite
from tests.support.features import require
from tests.support.figures import FIGURES, merge
from tests.support.paths import ROOT

# A busy machine is slow, not wrong.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
torch.set_num_threads(1)  # another worker, or a server, needs the other core


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megatron-opd")
    group.addoption("--seconds", metavar="TABLE", help="write the seconds of each file to it")
    group.addoption("--fast", action="store_true", help="only quick files of tests/unit")


def path_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("fast") or not collection_path.name.startswith("test_"):
        return None
    return None if suite.is_fast(path_of(collection_path), suite.read_table()) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: suite.rank_of(path_of(item.path)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        require(*marker.args)


SIGNALS = {
    number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
}


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """A test that runs the program in this process leaves the signals as they were.

    Otherwise what later tests start inherits that they are ignored. As they were when the tests
    began: a fixture of a whole module may run the program before this one sees its first test.
    """
    yield
    for number, handler in SIGNALS.items():
        signal.signal(number, handler)


class OneForServers(LoadScopeScheduling):
    """One worker runs every test of SERVERS, one those of RAY; a file stays together."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        kind = suite.kind_of(path)
        return kind if kind in (suite.SERVERS, suite.RAY) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneForServers:
    return OneForServers(config, log)


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
    table = config.getoption("seconds")
    if table and not hasattr(config, "workerinput"):  # a worker's reports reach the main process
        config.pluginmanager.register(suite.Seconds(Path(table)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FIGURES:
        return
    terminalreporter.section("measured errors (worst of n, limit)")
    width = max(map(len, FIGURES))
    for name, figure in sorted(FIGURES.items()):
        terminalreporter.write_line(
            f"{name:{width}}  {figure.worst:9.2e}  of {figure.times:4d}  < {figure.limit:.0e}"
        )
