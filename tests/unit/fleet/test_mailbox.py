"""Commands and answers are whole files of one user; whatever else lies there is refused."""

import os
import stat
from pathlib import Path

import pytest

from megatron_opd.fleet.mailbox import (
    DIRECTORY,
    MAX_BYTES,
    Answer,
    BadMailboxFile,
    Command,
    Mailbox,
    Sender,
    ServerRow,
)

ADD = Command("add", "http://a:1", "student")


@pytest.fixture
def mailbox(tmp_path: Path) -> Mailbox:
    box = Mailbox(tmp_path)
    box.open()
    return box


def test_a_command_and_its_answer(mailbox: Mailbox, tmp_path: Path):
    sender = Sender(tmp_path, ADD)
    assert sender.answer() is None
    ((name, command),) = mailbox.commands()
    assert command == ADD
    assert list(mailbox.commands()) == [], "each arrives once"
    row = ServerRow("student", "http://a:1", "serving", 3, 2, 0, None)
    mailbox.answer(name, Answer("done", servers=(row,)))
    assert sender.answer() == Answer("done", servers=(row,))
    assert os.listdir(tmp_path / DIRECTORY) == []


def test_several_commands_have_their_own_answers(mailbox: Mailbox, tmp_path: Path):
    senders = [Sender(tmp_path, Command("remove", f"http://{i}:1")) for i in range(9)]
    for name, command in mailbox.commands():
        assert isinstance(command, Command)
        mailbox.answer(name, Answer(command.url))
    assert [sender.answer() for sender in senders] == [Answer(f"http://{i}:1") for i in range(9)]


def test_only_the_run_s_user_reaches_it_and_nothing_of_an_earlier_run_is_left(
    mailbox: Mailbox, tmp_path: Path
):
    Sender(tmp_path, ADD)
    place = tmp_path / DIRECTORY
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (place, *place.iterdir())]
    assert modes == [0o700, 0o600]
    mailbox.open()
    assert list(mailbox.commands()) == []
    mailbox.close()
    assert not place.exists()
    with pytest.raises(FileNotFoundError):
        Sender(tmp_path, ADD)


def test_a_command_that_was_taken_back_is_not_executed(mailbox: Mailbox, tmp_path: Path):
    Sender(tmp_path, ADD).take_back()
    assert list(mailbox.commands()) == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"action":"stop"}',
        b'{"action":"add","url":1}',
        b'{"action":"list","shell":"true"}',
        b"\xff",
        b'{"a\xc9": "list"}',
        b'{"\\u001b[2J": "list", "action": "list"}',
        b'{"action": "' + b"a" * 5000 + b'"}',
        b" " * (MAX_BYTES + 1),
    ],
    ids=lambda raw: str(raw[:20]),
)
def test_what_is_no_command_is_refused_once(mailbox: Mailbox, tmp_path: Path, raw: bytes):
    path = tmp_path / DIRECTORY / f"{'a' * 32}.request"
    path.write_bytes(raw)
    ((name, problem),) = mailbox.commands()
    assert (name, type(problem)) == ("a" * 32, BadMailboxFile)
    assert str(problem).isprintable()
    assert len(str(problem)) < 1000
    assert not path.exists()


def test_links_and_pipes_are_not_read_and_other_names_are_left_alone(
    mailbox: Mailbox, tmp_path: Path
):
    place, secret = tmp_path / DIRECTORY, tmp_path / "secret"
    secret.write_text('{"action":"list"}')
    (place / f"{'a' * 32}.request").symlink_to(secret)
    os.mkfifo(place / f"{'b' * 32}.request")
    for name in ("note.txt", ".0.request", "../x.request".replace("/", "_")):
        (place / name).write_text("x")
    assert [type(problem) for _, problem in mailbox.commands()] == [BadMailboxFile, BadMailboxFile]
    assert secret.exists()
    assert len(os.listdir(place)) == 3


@pytest.mark.parametrize("raw", [b"no", b'{"a\xc9": 1}', b'{"\\u001b[2J": 1}'])
def test_an_answer_that_is_none_is_refused(mailbox: Mailbox, tmp_path: Path, raw: bytes):
    sender = Sender(tmp_path, ADD)
    ((name, _),) = mailbox.commands()
    (tmp_path / DIRECTORY / f"{name}.answer").write_bytes(raw)
    with pytest.raises(BadMailboxFile, match=r"^not an answer: ") as caught:
        sender.answer()
    assert str(caught.value).isprintable()
