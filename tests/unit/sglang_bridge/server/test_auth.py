"""What a server with an API key answers to whom, in front of SGLang's own check."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.utils import auth as theirs

from sglang_bridge.refusals import Refusals
from sglang_bridge.server import auth
from sglang_bridge.server.auth import KeyGuard

KEY = "secret-key"
RIGHT = (b"authorization", f"Bearer {KEY}".encode())


def refusals() -> Refusals:
    return Refusals(auth.logger, "by this server")


class Asked:
    """A guard, what it let through, and what it answered."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.guard = KeyGuard(self._app, KEY, refusals())

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append(scope.get("path", scope["type"]))

    def ask(
        self, path: str, *headers: tuple[bytes, bytes], method: str = "GET", **more: Any
    ) -> None:
        scope = {"type": "http", "method": method, "path": path, "headers": list(headers), **more}

        async def receive() -> Any:
            raise AssertionError("the body of a stranger is read")

        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)

        asyncio.run(self.guard(scope, receive, send))


@pytest.fixture
def asked() -> Iterator[Asked]:
    return Asked()


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/metrics/"])
def test_probes_are_open(asked: Asked, path: str):
    asked.ask(path)
    assert asked.passed == [path]
    assert asked.guard.refusals.count == 0


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/generate", "POST"),
        ("/health_generate", "GET"),
        ("/healthy", "GET"),
        ("/health/../generate", "POST"),
        ("/ready", "POST"),
        ("/generate", "OPTIONS"),
        ("//health", "GET"),
    ],
)
def test_all_else_needs_the_key(asked: Asked, path: str, method: str):
    asked.ask(path, method=method)
    assert asked.passed == []
    assert asked.sent[0]["status"] == 401
    assert asked.guard.refusals.count == 1
    asked.ask(path, RIGHT, method=method)
    assert asked.passed == [path]
    assert asked.guard.refusals.count == 1


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer another")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"authorization", b"Bearer \xff\x1b[31m")],
        [(b"authorization", b"Bearer  " + KEY.encode())],
        [RIGHT, (b"authorization", b"Bearer another")],
        [(b"host", b"x/health?")],
        [(b"x-api-key", KEY.encode())],
    ],
)
def test_a_key_that_is_not_the_servers_is_refused(asked: Asked, headers: list[tuple[bytes, bytes]]):
    asked.ask("/generate", *headers, method="POST")
    assert asked.passed == []
    assert asked.sent[0]["status"] == 401


def test_a_websocket_without_the_key_is_closed(asked: Asked):
    asked.ask("/v1/realtime", type="websocket")
    assert asked.passed == []
    assert asked.sent == [{"type": "websocket.close", "code": 1008}]
    asked.ask("/health", type="websocket")
    assert asked.passed == []
    asked.ask("/v1/realtime", RIGHT, type="websocket")
    assert asked.passed == ["/v1/realtime"]


def test_the_servers_own_start_passes(asked: Asked):
    asked.ask("", type="lifespan")
    assert asked.passed == [""]


def test_refusals_are_said_once_a_second(asked: Asked, caplog: pytest.LogCaptureFixture):
    for _ in range(50):
        asked.ask("/generate\x1b[31m", method="POST")
    assert asked.guard.refusals.count == 50
    assert [record.getMessage() for record in caplog.records] == [
        "refused by this server: a request without the API key (1 so far)"
    ]


def test_the_guard_is_asked_before_sglangs_check(monkeypatch: pytest.MonkeyPatch):
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    monkeypatch.setattr(theirs, "add_api_key_middleware", theirs.add_api_key_middleware)
    auth.guard_requests(KEY, refusals())
    app = FastAPI()

    @app.get("/health_generate")
    async def generate() -> str:
        return "a token"

    theirs.add_api_key_middleware(app, api_key=KEY, admin_api_key=None)
    client = TestClient(app)
    assert client.get("/health_generate").status_code == 401
    right = {"Authorization": f"Bearer {KEY}"}
    assert client.get("/health_generate", headers=right).json() == "a token"


def test_another_sglang_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(theirs, "add_api_key_middleware")
    with pytest.raises(RuntimeError, match="another version"):
        auth.guard_requests(KEY, refusals())
