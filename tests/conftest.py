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

from tests.support.features import require
from tests.support.figures import FIGURES, merge

# A busy machine is slow, not wrong.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
torch.set_num_threads(1)  # another worker, or a server, needs the other core

TESTS = Path(__file__).parent
# The longest first: a worker for SERVERS, the other for dist; short files even out the end.
# RAY: a Ray cluster finds others on its machine, and uses the same ports.
SERVERS, RAY = "servers", "ray"
ORDER = (SERVERS, "dist", "e2e", RAY)
# Of tests/e2e: these start servers of their own and may run on either worker.
APART = (
    "test_bridge_parallel.py",
    "test_deterministic.py",
    "test_resume.py",
    "test_torchrun_scripts.py",
)


def kind_of(path: str) -> str:
    """The first folder below tests/, SERVERS: what uses the two servers of a session, or RAY."""
    kind, *_, name = path.removeprefix("tests/").split("/")
    if name.startswith("test_ray_") or name.endswith("_ray.py"):
        return RAY
    return SERVERS if kind == "e2e" and name not in APART else kind


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        kind = kind_of(item.path.relative_to(TESTS).as_posix())
        return ORDER.index(kind) if kind in ORDER else len(ORDER)

    items.sort(key=rank)


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
        kind = kind_of(path)
        return kind if kind in (SERVERS, RAY) else path


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FIGURES:
        return
    terminalreporter.section("measured errors (worst of n, limit)")
    width = max(map(len, FIGURES))
    for name, figure in sorted(FIGURES.items()):
        terminalreporter.write_line(
            f"{name:{width}}  {figure.worst:9.2e}  of {figure.times:4d}  < {figure.limit:.0e}"
        )
