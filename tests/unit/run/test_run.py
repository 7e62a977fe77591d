"""What a run that fails says, and what it leaves alone."""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.launch.health import EngineLost, ProcessDied
from megatron_opd.launch.learner_process import LearnerProcess
from megatron_opd.launch.processes import Processes
from megatron_opd.run import start
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.ports import free_port
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.server.spec import ServerSpec
from tests.support.cli_cases import call


def test_an_unforeseen_error_before_the_directory_is_ours_is_printed(
    tmp_path: Path,
    config: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Before: the traceback was written among the logs of the earlier run."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("unforeseen")

    for role in ("student", "teacher"):
        config[role] |= {"urls": [f"http://127.0.0.1:{free_port()}"]}
    config["learner"] = {"listen_port": free_port()}
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "config.resolved.yaml").write_text("an earlier run")
    monkeypatch.setattr(start, "make_fleet", broken)
    capsys.readouterr()

    assert call(tmp_path, config, "--overwrite", verb="control") == 1
    told = capsys.readouterr().err.strip().splitlines()
    assert list(logs.iterdir()) == []
    assert told[0] == "Traceback (most recent call last):"
    assert told[-1] == "error: ZeroDivisionError: unforeseen; its traceback is above"


# ------------------------------------------------------------ while the learner still starts


class UpAtOnce(ServerProcess):
    """A server that is ready as soon as it runs."""

    def __init__(self, spec: ServerSpec, log: Path, process: subprocess.Popen[bytes]) -> None:
        super().__init__(spec, log)
        self.process = process

    def exit_code(self) -> int | None:
        return self.process.poll()

    def wait_ready(self, timeout_s: float) -> None:
        """It is."""


class Starting(LearnerProcess):
    """A learner that never comes up and never ends."""

    def exit_code(self) -> int | None:
        return None


class Remote:
    """Its connection to nobody."""

    address = "tcp://127.0.0.1:1"

    async def wait_ready(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def failed(self) -> Exception:
        await asyncio.sleep(600)
        return AssertionError("nobody is there to fail")


class RunsAlready(Processes):
    """Processes that were started before."""

    def start(self) -> None:
        """They were."""


def starting_run(processes: Processes, remote: Any, **more: Any) -> Any:
    section = {"model": "m"}
    tree = {"data": {"train": "d"}, "student": section, "teacher": section}
    config, roles = Config.model_validate(tree), ("student", "teacher")
    run_dir = SimpleNamespace(logs=Path("logs"))
    return SimpleNamespace(
        config=config, roles=roles, processes=processes, remote=remote, run_dir=run_dir,
        machines=SimpleNamespace(line=None), directory=SimpleNamespace(take_over=lambda: None),
        say=lambda *lines: None, **more,
    )  # fmt: skip


def test_a_server_that_dies_while_the_learner_starts_is_noticed(tmp_path: Path):
    """Before: only once the learner was up, or startup_timeout_s had passed."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    spec = ServerSpec(model_path="m", role="student", port=1234)
    server = UpAtOnce(spec, tmp_path / "student-0.log", process)
    learner = Starting(["learner"], tmp_path / "learner.log", None)
    starting = starting_run(RunsAlready([server], learner), Remote())

    async def main() -> None:
        connecting = asyncio.create_task(start._start_and_connect(starting, {}))
        await asyncio.sleep(0.2)
        assert not connecting.done()
        process.kill()
        await asyncio.wait_for(connecting, 20)

    words = r"^student server http://127.0.0.1:1234 ended with signal 9, see .*student-0.log$"
    try:
        with pytest.raises(ProcessDied, match=words):
            asyncio.run(main())
    finally:
        process.kill()
        process.wait()


def test_a_server_elsewhere_too(monkeypatch: pytest.MonkeyPatch):
    class Fleet:
        """One server, which answers once and is gone then."""

        async def alive(self) -> bool:
            raise ServerUnreachable("http://far:1", "/model_info", "refused", sent=False)

        @property
        def clients(self) -> tuple[Any, ...]:
            return (SimpleNamespace(url="http://far:1", alive=self.alive),)

    async def joins(*_: object) -> None:
        """Its facts are in order."""

    monkeypatch.setattr(start, "join", joins)
    urls = dict.fromkeys(("student", "teacher"), ("http://far:1",))
    starting = starting_run(Processes([], None), Remote(), urls=urls)
    fleets: Any = {role: Fleet() for role in starting.roles}
    waiting = start._wait_for_others(starting, fleets)
    with pytest.raises(EngineLost, match=r"^(student|teacher) server http://far:1 is gone"):
        run_virtual(waiting)
