"""Who gets an answer: the token, the name of the host, and what every answer forbids a browser."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientResponse, ClientSession, CookieJar
from aiohttp.test_utils import TestServer

from megatron_opd.report.run_files import RunFiles
from megatron_opd.watch.access import HEADERS, Access, cookie_name, host_name
from megatron_opd.watch.server import WatchServer
from megatron_opd.watch.watched import Watched
from tests.support.watched_run import write_run

TOKEN, PORT = "right-token", 8650
PATHS = ("/", "/static/main.js", "/api/state", "/api/rollouts", "/api/rollouts/0", "/nothing")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("watched") / "run", updates=4, per_update=3)


Asked = Callable[..., Awaitable[ClientResponse]]


def served(run_dir: Path, scenario: Callable[[Asked], Awaitable[None]]) -> None:
    """Call `scenario` with what asks a server for a path; cookies are its caller's."""

    async def main() -> None:
        app = WatchServer(Watched(RunFiles(run_dir))).app(Access(TOKEN, frozenset({"box"})), PORT)
        async with TestServer(app) as server, ClientSession(cookie_jar=CookieJar()) as session:

            async def ask(
                path: str, method: str = "GET", cookie: str | None = None, host: str | None = None
            ) -> ClientResponse:
                headers = {"Cookie": f"{cookie_name(PORT)}={cookie}"} if cookie else {}
                headers |= {"Host": host} if host else {}
                url = server.make_url("/")
                answer = await session.request(
                    method, f"{str(url)[:-1]}{path}", headers=headers, allow_redirects=False
                )
                await answer.read()
                return answer

            await scenario(ask)

    asyncio.run(main())


@pytest.mark.parametrize("cookie", [None, "wrong-token", "right-toke", "right-token2"])
def test_without_the_token_there_is_nothing(run_dir: Path, cookie: str | None):
    async def scenario(ask: Asked) -> None:
        for path in PATHS:
            answer = await ask(path, cookie=cookie)
            assert answer.status == 403
            assert (await answer.text()).startswith("403: the token is missing or wrong")
        assert (await ask("/?token=wrong")).status == 403

    served(run_dir, scenario)


def test_the_printed_address_leaves_the_token_in_a_cookie_only(run_dir: Path):
    async def scenario(ask: Asked) -> None:
        answer = await ask(f"/?token={TOKEN}")
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.headers["Set-Cookie"]
        assert cookie.startswith(f"{cookie_name(PORT)}={TOKEN};")
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert (await ask("/", cookie=TOKEN)).status == 200

    served(run_dir, scenario)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8650", 200),
        ("10.1.2.3", 200),
        ("[::1]:8650", 200),
        ("BOX:8650", 200),
        ("evil.example:8650", 403),
        ("127.0.0.1.evil.example", 403),
        ("box.evil.example", 403),
    ],
)
def test_a_name_that_others_may_resolve_to_this_machine_is_refused(run_dir, host, status):
    async def scenario(ask: Asked) -> None:
        assert (await ask("/api/state", cookie=TOKEN, host=host)).status == status
        assert (await ask(f"/?token={TOKEN}", host=host)).status == (303 if status == 200 else 403)

    served(run_dir, scenario)


def test_every_answer_fences_model_text_in(run_dir: Path):
    async def scenario(ask: Asked) -> None:
        answers = [await ask(path, cookie=TOKEN) for path in PATHS]
        answers += [await ask("/"), await ask(f"/?token={TOKEN}"), await ask("/api/rollouts?a=b")]
        for answer in answers:
            for name, value in HEADERS.items():
                assert answer.headers[name] == value

    served(run_dir, scenario)
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(run_dir: Path, method: str):
    async def scenario(ask: Asked) -> None:
        for path in ("/", "/api/state", "/api/rollouts/0"):
            assert (await ask(path, method=method, cookie=TOKEN)).status == 405

    served(run_dir, scenario)


def test_names_of_hosts():
    assert host_name("a.b:80") == "a.b"
    assert host_name("[fe80::1]:80") == "fe80::1"
    assert host_name("1.2.3.4") == "1.2.3.4"
