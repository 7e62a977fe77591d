"""`opd fleet` as a user calls it: a table, JSON, or one line and exit code 2."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_opd.checkpoint.run_lock import RunLock
from megatron_opd.cli.main import main
from megatron_opd.fleet.mailbox import DIRECTORY, Answer, Command, Mailbox, ServerRow

A = "http://127.0.0.1:30000"
ROWS = (
    ServerRow("student", A, "serving", 3, 2, 1, 41.7),
    ServerRow("teacher", "http://127.0.0.1:30100", "lost", None, 0, 0, None),
)


@contextmanager
def running(path: Path, answer: Answer | None = None) -> Iterator[list[object]]:
    """A run that holds its directory, and answers the first command, if at all."""
    lock, mailbox = RunLock.take(path), Mailbox(path)
    mailbox.open()
    asked: list[object] = []
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            for name, command in mailbox.commands():
                asked.append(command)
                if answer is None:  # it ends instead
                    mailbox.close()
                    lock.release()
                    return
                mailbox.answer(name, answer)
            time.sleep(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        thread.join()
        lock.release()


def call(*arguments: object) -> int:
    return main(["fleet", *map(str, arguments)])


def test_list_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with running(tmp_path, Answer(servers=ROWS)) as asked:
        assert call("list", tmp_path) == 0
        table = capsys.readouterr().out.splitlines()
        assert call("list", tmp_path, "--json") == 0
        found = json.loads(capsys.readouterr().out)
    assert asked == [Command("list")] * 2
    assert table[0].strip() == "2 servers"
    assert [line.split() for line in table if "http" in line] == [
        ["student", A, "serving", "3", "2", "1", "42"],
        ["teacher", "http://127.0.0.1:30100", "lost", "0", "0"],
    ]
    assert found[0] == {
        "role": "student",
        "url": A,
        "state": "serving",
        "version": 3,
        "in_flight": 2,
        "restarts": 1,
        "tokens_per_s": 41.7,
    }
    assert found[1]["version"] is None


def test_add_and_remove_print_what_the_run_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with running(tmp_path, Answer("it is done")) as asked:
        assert call("add", tmp_path, A) == 0
        assert call("add", tmp_path, A, "--role", "teachers.maths") == 0
        assert call("remove", tmp_path, A) == 0
    assert capsys.readouterr().out == "it is done\n" * 3
    assert asked == [
        Command("add", A, "student"),
        Command("add", A, "teachers.maths"),
        Command("remove", A),
    ]


def test_what_the_run_refuses_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with running(tmp_path, Answer("no such server", failed=True)):
        assert call("remove", tmp_path, A) == 2
    assert capsys.readouterr() == ("", "error: no such server\n")


def test_without_a_run_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert call("list", tmp_path / "nowhere") == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/nowhere: no run is under way there\n"
    (tmp_path / DIRECTORY).mkdir()  # of a run that was killed
    assert call("add", tmp_path, A) == 2
    assert "no run is under way there" in capsys.readouterr().err
    with running(tmp_path):
        assert call("remove", tmp_path, A) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: the run ended before it answered\n"
    lock = RunLock.take(tmp_path)
    assert call("list", tmp_path) == 2
    lock.release()
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: the run is starting, or ending; ask it while it trains\n"
    )
