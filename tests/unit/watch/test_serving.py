"""Where `opd watch` listens, and what it tells its user."""

import asyncio
from pathlib import Path

import pytest

from megatron_opd.report.run_files import RunFiles
from megatron_opd.watch.serving import CannotListen, greeting, known_names, listen, serve
from tests.support.watched_run import write_run


def test_a_port_that_is_taken_is_named():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(CannotListen, match=f"--port {port}: cannot listen there: .*--port 0"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "999.1.1.1", "a" * 300])
def test_a_host_that_is_none_is_named(host: str):
    with pytest.raises(CannotListen, match=f"--host .*{host[:20]}"):
        listen(host, 0)


def test_names_of_this_machine_are_known_where_others_may_ask(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Box")
    monkeypatch.setattr("socket.getfqdn", lambda: "box.lan")
    assert known_names("127.0.0.1") == {"localhost", "127.0.0.1"}
    assert known_names("0.0.0.0") == {"localhost", "0.0.0.0", "box", "box.lan"}


def test_the_user_is_told_where_and_what_it_means(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    run = Path("runs/a")
    assert greeting(run, "127.0.0.1", 8, "t") == [
        "watching runs/a; Ctrl-C ends this, never the run",
        "http://127.0.0.1:8/?token=t",
        "from another machine: ssh -L 8:127.0.0.1:8 box",
    ]
    assert greeting(run, "::1", 8, "t")[1] == "http://[::1]:8/?token=t"
    wide = greeting(run, "0.0.0.0", 8, "t")
    assert wide[1] == "http://box:8/?token=t"
    assert wide[2] == "whoever has this address can read the run; it is not encrypted"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /\x1b[2J\x1b[31mred HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: \x1b[31m" + bytes(70_000) + b"\r\n\r\n",
    ],
)
def test_what_is_not_http_is_counted_and_not_shown(
    sent: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    files = RunFiles(write_run(tmp_path / "run", updates=1, per_update=1))

    async def main() -> bytes:
        said: list[str] = []
        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(serve(files, listener, "127.0.0.1", said.append))
            while not said:  # noqa: ASYNC110  a list has no event
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            answer = await reader.read(100)
            writer.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        return answer

    assert asyncio.run(main()).split()[1] == b"400"
    assert [record.getMessage() for record in caplog.records] == [
        "refused by opd watch: what is not HTTP (1 so far)"
    ]
