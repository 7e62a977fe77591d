"""What ends a run of real engines before its first update is told, not what ended because of it."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_bridge import wire
from sglang_bridge.claims import Claim, ClaimRefused
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import PortInUse
from sglang_bridge.server.launch import Readiness, ServerProcess
from tests.e2e.conftest import Sections
from tests.e2e.runs import Running, write_config
from tests.support.gateway import Answer, gateway

pytestmark = pytest.mark.e2e

FIRST = Claim("first", "p", "run /runs/first", writes=True)
SIGN_IN = (200, "text/html", b"<html>sign in</html>")
NO_KEY = (401, "application/json", b"{}")


@dataclass(frozen=True)
class Fault:
    """A gateway's to a role's server, and what is told of it. URL: the gateway's."""

    role: str
    path: str
    answer: Answer | None
    told: str


FAULTS = {
    "gateway": Fault("teacher", wire.WORK_ROUTE, SIGN_IN, "URL/bridge/generate: the reply must be"),
    "key": Fault("teacher", wire.WORK_ROUTE, NO_KEY, "URL/bridge/generate: HTTP 401: no API key"),
    "sync": Fault("student", "/pause_generation", None, "URL/pause_generation: no answer"),
}


def cause_of(running: Running) -> str:
    """What the user is told; the summary, where there is one, tells the same."""
    done = running.finish(120)
    assert done.code != 0
    *_, line = [line for line in done.output.splitlines() if line.startswith("error: ")]
    if (done.run_dir / "summary.json").exists():
        assert done.summary["status"] == "failed"
        assert done.summary["cause"] in line
    return line


def config_of(inputs: Path, tmp_path: Path, sections: Sections) -> Path:
    """A run that goes on without nothing that it loses."""
    alone = {"max_restarts": 0}
    return write_config(
        inputs,
        tmp_path,
        student={**sections["student"], **alone},
        teacher={**sections["teacher"], **alone},
        learner=alone,
        scoring={"guard": "refuse"},
        evaluation={"problems": 0},
        metrics={"progress": False, "tensorboard": False},
    )


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_gateway_answers_is_told(
    shared: Sections, inputs: Path, tmp_path: Path, start: Callable[..., Running], name: str
):
    fault = FAULTS[name]
    (target,) = shared[fault.role]["urls"]
    with gateway(target, fault.path, lambda: fault.answer) as url:
        through = shared | {fault.role: {"urls": [url]}}
        line = cause_of(start(config_of(inputs, tmp_path, through)))
    assert fault.told.replace("URL", url) in line


def test_the_end_of_the_learner_is_told(
    shared: Sections, inputs: Path, tmp_path: Path, start: Callable[..., Running]
):
    """It is killed while a teacher's answer is awaited, which then never comes."""
    (target,) = shared["teacher"]["urls"]
    runs: list[Running] = []

    def kill() -> None:
        runs[0].kill_a_rank()

    with gateway(target, wire.WORK_ROUTE, kill) as url:
        through = shared | {"teacher": {"urls": [url]}}
        runs.append(start(config_of(inputs, tmp_path, through)))
        assert "the learner ended with signal 9" in cause_of(runs[0])


def test_a_server_is_one_run_s(
    shared: Sections,
    student_server: ServerProcess,
    inputs: Path,
    tmp_path: Path,
    start: Callable[..., Running],
):
    spec = student_server.spec
    other = Readiness(spec.host, spec.port, "another start's", "student.base_port")
    with pytest.raises(PortInUse, match=rf"^student.base_port: port {spec.port} is in use"):
        other.reached()

    async def while_claimed() -> str:
        async with ServerClient(spec.url, timeout_s=60) as client:
            await client.claim(FIRST)
            line = await asyncio.to_thread(
                lambda: cause_of(start(config_of(inputs, tmp_path, shared)))
            )
            assert await client.alive()
            return line

    line = asyncio.run(while_claimed())
    assert f"student.urls: {spec.url}: run /runs/first writes its weights into this server" in line

    async def after() -> None:
        second = Claim("second", "p", "run /runs/second", writes=True)
        for url in (*shared["student"]["urls"], *shared["teacher"]["urls"]):
            async with (
                ServerClient(url, timeout_s=60) as client,
                ServerClient(url, timeout_s=60) as scores,
            ):
                await client.claim(second)  # nobody holds it any more
                with pytest.raises(ClaimRefused, match="run /runs/second writes"):
                    await scores.claim(Claim("third", "p", "run /runs/third", writes=False))

    asyncio.run(after())
    assert not (tmp_path / "run").exists(), json.dumps([p.name for p in tmp_path.iterdir()])
