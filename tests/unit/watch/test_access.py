"""Who gets an answer: the token, the name of the host, and what every answer forbids a browser."""

from pathlib import Path

import pytest

from megatron_opd.watch.access import HEADERS, cookie_name, host_name
from tests.support.watch_server import PORT, TOKEN, Asked, served
from tests.support.watched_run import write_run

PATHS = ("/", "/static/main.js", "/api/state", "/api/rollouts", "/api/rollouts/0", "/nothing")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("watched") / "run", updates=4, per_update=3)


@pytest.mark.parametrize("cookie", [None, "wrong-token", "right-toke", "right-token2"])
def test_without_the_token_there_is_nothing(run_dir: Path, cookie: str | None):
    async def scenario(ask: Asked) -> None:
        for path in PATHS:
            answer = await ask(path, cookie=cookie)
            assert answer.status == 403
            assert (await answer.text()).startswith("403: the token is missing or wrong")
        assert (await ask("/?token=wrong", cookie=None)).status == 403

    served(run_dir, scenario)


def test_the_printed_address_leaves_the_token_in_a_cookie_only(run_dir: Path):
    async def scenario(ask: Asked) -> None:
        answer = await ask(f"/?token={TOKEN}", cookie=None)
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.headers["Set-Cookie"]
        assert cookie.startswith(f"{cookie_name(PORT)}={TOKEN};")
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert (await ask("/")).status == 200

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
        assert (await ask("/api/state", host=host)).status == status
        assert (await ask(f"/?token={TOKEN}", cookie=None, host=host)).status == (
            303 if status == 200 else 403
        )

    served(run_dir, scenario)


def test_every_answer_fences_model_text_in(run_dir: Path):
    async def scenario(ask: Asked) -> None:
        answers = [await ask(path) for path in PATHS]
        answers += [
            await ask("/", cookie=None),
            await ask(f"/?token={TOKEN}", cookie=None),
            await ask("/api/rollouts?a=b"),
        ]
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
            assert (await ask(path, method=method)).status == 405

    served(run_dir, scenario)


def test_names_of_hosts():
    assert host_name("a.b:80") == "a.b"
    assert host_name("[fe80::1]:80") == "fe80::1"
    assert host_name("1.2.3.4") == "1.2.3.4"


def test_who_is_refused_is_counted_in_the_log(run_dir: Path, caplog: pytest.LogCaptureFixture):
    async def scenario(ask: Asked) -> None:
        for _ in range(3):
            assert (await ask("/\x1b[31m", cookie=None)).status == 403
        assert (await ask("/")).status == 200

    served(run_dir, scenario)
    assert [record.getMessage() for record in caplog.records] == [
        "refused by opd watch: a request without the token (1 so far)"
    ]
