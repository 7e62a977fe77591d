"""Where `opd watch` listens, and what it tells its user."""

from pathlib import Path

import pytest

from megatron_opd.watch.serving import CannotListen, greeting, is_loopback, known_names, listen


def test_a_port_that_is_taken_is_named():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(CannotListen, match=f"--port {port}: cannot listen there: .*--port 0"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "999.1.1.1", "a" * 300])
def test_a_host_that_is_none_is_named(host: str):
    with pytest.raises(CannotListen, match=f"--host .*{host[:20]}"):
        listen(host, 0)


def test_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "box")))


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
