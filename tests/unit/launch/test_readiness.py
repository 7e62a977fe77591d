"""`opd control` waits for what was started elsewhere, says for what, and leaves nothing behind."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opd.launch import readiness
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.readiness import StartingPart, all_ready, ready_now, servers_ready
from sglang_bridge.errors import BadReply, ServerRefused, ServerUnreachable
from sglang_bridge.ports import free_port
from sglang_bridge.server.compiling import SAID
from tests.support.cli_cases import call, refused, small_config, tiny_models


class Starting:
    """A fleet that answers at the last of `outcomes`."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)

    async def start(self, *, used: bool, claim: None) -> tuple[str, ...]:
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return ("up",)


REFUSED = ServerUnreachable("http://h:1", "/server_info", "refused", sent=False)
LOADING = ServerRefused("http://h:1", "/server_info", 503, "loading")
FORBIDDEN = ServerRefused("http://h:1", "/server_info", 401, "no")


def test_servers_may_take_their_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readiness, "RETRY_S", 0.001)
    fleet: Any = Starting(REFUSED, LOADING, None)
    assert asyncio.run(servers_ready(fleet, 30)) == ("up",)


@pytest.mark.parametrize(
    ("outcomes", "limit_s"), [((REFUSED,), 0), ((FORBIDDEN, None), 30), ((BadReply("x"), None), 30)]
)
def test_what_will_not_pass_is_raised_at_once(outcomes: tuple[Any, ...], limit_s: float):
    fleet: Any = Starting(*outcomes)
    with pytest.raises(type(outcomes[0])):
        asyncio.run(servers_ready(fleet, limit_s))


async def forever() -> None:
    await asyncio.sleep(600)


def test_it_says_what_is_missing_and_ends_with_the_first_failure():
    said: list[str] = []

    async def main() -> None:
        fails = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.2, fails.set_exception, RuntimeError("no"))
        never = asyncio.create_task(asyncio.sleep(600))
        soon = asyncio.sleep(0.01)
        waits: dict[str, Any] = {"a": never, "b": fails, "c": soon}
        parts = {name: StartingPart(wait, forever) for name, wait in waits.items()}
        parts["a"] = StartingPart(never, forever, lambda: " (compiling)")
        with pytest.raises(RuntimeError, match="no"):
            await all_ready(parts, said.append, every_s=0.05)
        assert never.cancelled()
        assert len(asyncio.all_tasks()) == 1, "nobody is watched any more"

    asyncio.run(main())
    assert set(said) == {"waiting for a (compiling), b"}


def test_a_server_says_which_kernels_it_compiles_meanwhile(tmp_path: Path):
    server: Any = SimpleNamespace(name="student", url="", log_path=tmp_path / "log", exit_code=int)
    server.wait_ready, server.cause = float, str
    part: Any = Processes([server], None).parts(1)["student"]
    part.ready.close()
    assert part.progress() == ""
    server.log_path.write_text(f"{SAID}norm\n")
    assert "1 so far, the last norm" in part.progress()


def test_a_part_that_is_gone_again_ends_the_wait_for_the_others():
    watched: list[str] = []

    async def gone() -> None:
        watched.append("a")
        raise RuntimeError("a is gone")

    async def main() -> None:
        parts = {"a": StartingPart(ready_now(), gone), "b": StartingPart(forever(), forever)}
        with pytest.raises(RuntimeError, match="a is gone"):
            await asyncio.wait_for(all_ready(parts, print), 30)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert watched == ["a"]


def test_all_that_are_there_are_left_alone():
    async def main() -> None:
        await all_ready({name: StartingPart(ready_now(), forever) for name in "ab"}, print)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("earlier", [False, True])
def test_a_controller_that_nobody_joins_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], earlier: bool
):
    """Before: it did not wait, and the directory then needed --overwrite."""
    config = small_config(tmp_path, tiny_models(tmp_path / "models"))
    capsys.readouterr()
    run_dir = tmp_path / "run"
    if earlier:
        run_dir.mkdir()
        (run_dir / "config.resolved.yaml").write_text("an earlier run")
    for role in ("student", "teacher"):
        config[role] |= {"urls": [f"http://127.0.0.1:{free_port()}"], "startup_timeout_s": 0.5}
    config["learner"] = {"listen_port": free_port()}
    for _ in range(2):  # the second one needs no --overwrite
        options = ["--overwrite"] if ready_now else []
        refused(capsys, call(tmp_path, config, *options, verb="control"), "start", "within 0.5 s")
    if earlier:
        assert [path.name for path in run_dir.iterdir()] == ["config.resolved.yaml"]
        assert (run_dir / "config.resolved.yaml").read_text() == "an earlier run"
    else:
        assert not run_dir.exists()
