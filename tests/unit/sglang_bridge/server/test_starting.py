"""What SGLang's own application answers while the server has not sampled its first token."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sglang_bridge import wire
from sglang_bridge.server.entry import offer_standins

offer_standins()
from sglang.srt.entrypoints import http_server  # noqa: E402  (it needs torchvision)
from sglang.srt.managers.tokenizer_manager import ServerStatus  # noqa: E402

from sglang_bridge.server import owner, starting  # noqa: E402

CONTROL = (
    *("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"),
    *("/begin_weight_update", "/end_weight_update", "/update_weight_version"),
    *("/init_weights_update_group", "/destroy_weights_update_group"),
    *("/update_weights_from_disk", "/update_weights_from_distributed"),
    *("/update_weights_from_tensor", "/update_weights_from_ipc", "/weights_checker"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/set_internal_state"),
)
"""All that a client of ours posts but work and claims, and SGLang's like of it."""


class Manager:
    """Stands for SGLang's: has a status, keeps what reached it, and does nothing."""

    def __init__(self) -> None:
        self.server_status = ServerStatus.Starting
        self.is_generation = self.gracefully_exit = False
        self.asked: list[str] = []

    async def pause_generation(self, asked: Any) -> None:
        self.asked.append(f"pause {asked.mode}")

    def generate_request(self, asked: Any, request: Any) -> Any:
        self.asked.append("generate")
        return self._tokens()

    async def _tokens(self) -> Any:
        yield {"text": "a token"}

    def is_ready(self) -> bool:
        return self.server_status == ServerStatus.Up


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """Of the application, guarded."""
    app, made = http_server.app, Manager()
    kept = list(app.user_middleware), app.middleware_stack, list(app.router.routes)
    app.middleware_stack = None
    starting.guard_start()
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=made))
    yield made
    app.user_middleware[:], app.middleware_stack, app.router.routes[:] = kept


@pytest.fixture
def client() -> TestClient:
    return TestClient(http_server.app, raise_server_exceptions=False)


@pytest.mark.parametrize("path", CONTROL)
def test_control_is_refused_before_the_first_token(manager: Manager, client: TestClient, path: str):
    answer = client.post(path, json={"mode": "retract"})
    assert answer.status_code == wire.STARTING
    assert answer.json() == {"error": {"message": starting.REFUSED}}
    assert manager.asked == []


@pytest.mark.parametrize("status", [ServerStatus.Up, ServerStatus.UnHealthy])
def test_control_passes_after_it(manager: Manager, client: TestClient, status: ServerStatus):
    """Also where a probe of /health made it unhealthy, as it was paused: it could never go on."""
    manager.server_status = status
    assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    assert manager.asked == ["pause retract"]


def test_what_the_start_needs_passes(manager: Manager, client: TestClient):
    """The first token, which the server asks itself for, and the question whether it has come."""
    assert client.post("/generate", json={"text": "a"}).json() == {"text": "a token"}
    assert (client.get("/ready").status_code, client.get("/ready").content) == (503, b"")
    assert client.get("/pause_generation").status_code == 405
    assert manager.asked == ["generate"]


def test_a_start_is_proved_once_it_is_over(manager: Manager, client: TestClient):
    owner.add_owner_routes("nonce")
    assert client.get(wire.PROOF_ROUTE, params={wire.CHALLENGE: "c"}).status_code == wire.STARTING
    manager.server_status = ServerStatus.Up
    assert client.get(wire.PROOF_ROUTE, params={wire.CHALLENGE: "c"}).status_code == 200


def test_before_there_is_anybody_to_ask_it_is_starting(
    manager: Manager, client: TestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_server, "_global_state", None)
    assert client.post("/pause_generation", json={}).status_code == wire.STARTING
