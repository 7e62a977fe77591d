"""`opd watch` as a user runs it: its address, its refusals, and that it leaves the run alone."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from megatron_opd.cli.commands.watch import NICE
from megatron_opd.cli.main import main
from tests.support.cli_cases import refused
from tests.support.sockets import listening
from tests.support.watched_run import make_running, write_run


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run", updates=1)
    refused(capsys, main(["watch", str(tmp_path / "no")]), "there is no such directory")
    refused(capsys, main(["watch", str(run / "summary.json")]), "is a file")
    (tmp_path / "other").mkdir()
    refused(capsys, main(["watch", str(tmp_path / "other")]), "not a run's directory")
    refused(capsys, main(["watch", str(run), "--port", "70000"]), "--port", "70000")
    refused(capsys, main(["watch", str(run), "--host", "no.such.invalid"]), "--host")


def files_of(path: Path) -> dict[str, tuple[int, int, bytes]]:
    found = {}
    for file in sorted(path.rglob("*")):
        status = file.stat()
        found[file.name] = (status.st_ino, status.st_mtime_ns, file.read_bytes())
    return found


def test_a_run_is_served_to_who_has_the_address_and_left_alone(tmp_path: Path):
    run = write_run(tmp_path / "run", updates=3, per_update=2)
    make_running(run)
    before = files_of(run)
    command = [sys.executable, "-m", "megatron_opd", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout is not None
            lines = [watch.stdout.readline().strip() for _ in range(3)]
            found = re.fullmatch(r"(http://127\.0\.0\.1:(\d+)/)\?token=(\S{43})", lines[1])
            assert found, lines
            assert [(ip, port) for ip, port, _ in listening(watch.pid)] == [
                ("127.0.0.1", int(found[2]))
            ]
            assert os.getpriority(os.PRIO_PROCESS, watch.pid) == NICE
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(f"{found[1]}api/state")
            known = urllib.request.build_opener(
                urllib.request.HTTPCookieProcessor(CookieJar()), urllib.request.ProxyHandler({})
            )
            assert b"<title>opd watch</title>" in known.open(lines[1]).read()
            assert known.open(f"{found[1]}api/state").status == 200
        finally:
            watch.send_signal(signal.SIGINT)
        assert watch.wait() == 0
    assert files_of(run) == before
