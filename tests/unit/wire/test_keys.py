"""The file of a run's secrets: who may read it, what it says, what never shows them."""

import json
import os
from pathlib import Path

import pytest

from megatron_opd.wire.keys import (
    FILE_VARIABLE,
    KEYS_FILE,
    RANK_VARIABLE,
    RETIRED_VARIABLE,
    RankKeys,
    RunKeys,
    named_file,
    rank_keys,
)

SERVERS = {"student": "a key of a server".replace(" ", "-")}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FILE_VARIABLE, RANK_VARIABLE, RETIRED_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_a_file_holds_what_was_written_and_is_closed_to_others(tmp_path: Path):
    keys, path = RunKeys.make(SERVERS), tmp_path / KEYS_FILE
    old = os.umask(0)
    try:
        path.write_text("an earlier run's, open to all")
        keys.write(path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunKeys.read(path) == keys
    assert os.listdir(tmp_path) == [KEYS_FILE]
    assert keys != RunKeys.make(SERVERS)


def test_no_secret_is_shown():
    keys = RunKeys.make(SERVERS)
    shown = repr(keys) + repr(keys.ranks)
    for secret in (keys.controller.decode(), keys.learner.decode(), SERVERS["student"]):
        assert secret not in shown


def test_a_rank_gets_its_half_alone():
    keys = RunKeys.make(SERVERS)
    text = keys.ranks.text()
    assert RankKeys.parse(text) == keys.ranks
    assert keys.controller.decode() not in text


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o610])
def test_a_file_that_others_may_open_is_refused(tmp_path: Path, mode: int):
    path = tmp_path / KEYS_FILE
    RunKeys.make().write(path)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"must be closed to others, got mode {mode:o}: chmod 600"):
        RunKeys.read(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / KEYS_FILE
    RunKeys.make().write(path)
    owner = os.geteuid() or 1234
    if os.geteuid() == 0:
        os.chown(path, owner, -1)
    else:  # who is not root gives no file away
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=f"must belong to this user, got user {owner}$"):
        RunKeys.read(path)


def test_a_directory_in_its_place_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read"):
        RunKeys.read(tmp_path)


GOOD = {"controller": RunKeys.make().controller.decode(), "servers": {}}
GOOD["learner"] = RunKeys.make().learner.decode()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        json.dumps({**GOOD, "servers": []}),
        json.dumps({**GOOD, "servers": {"student": "\x1b[31mred"}}),
        json.dumps({**GOOD, "servers": {"student": ""}}),
        json.dumps({**GOOD, "learner": "short"}),
        json.dumps({**GOOD, "learner": "é" * 40}),
        json.dumps({**GOOD, "learner": "#" * 40}),
        json.dumps({**GOOD, "learner": 7}),
        json.dumps({key: value for key, value in GOOD.items() if key != "controller"}),
        json.dumps(GOOD) + " " * 70_000,
    ],
    ids=range(12),  # the keys in them are new ones every time
)
def test_a_damaged_file_is_one_line_without_secrets(tmp_path: Path, content: str):
    path = tmp_path / KEYS_FILE
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"is damaged: (not a run's|no file of)") as caught:
        RunKeys.read(path)
    assert str(caught.value).isprintable()
    assert str(GOOD["controller"]) not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_where_a_rank_finds_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_dir, elsewhere = tmp_path / "run", tmp_path / "my.keys"
    run_dir.mkdir()
    assert rank_keys(run_dir) is None
    in_dir, named, given = (RunKeys.make() for _ in range(3))
    in_dir.write(run_dir / KEYS_FILE)
    assert rank_keys(run_dir) == in_dir.ranks
    monkeypatch.setenv(FILE_VARIABLE, str(elsewhere))
    assert rank_keys(run_dir) is None
    named.write(elsewhere)
    assert rank_keys(run_dir) == named.ranks
    monkeypatch.setenv(RANK_VARIABLE, given.ranks.text())
    assert rank_keys(run_dir) == given.ranks


@pytest.mark.parametrize(
    "text", ["", "x", "a b", GOOD["learner"], f"{GOOD['learner']} x", "# " * 9], ids=range(6)
)
def test_a_variable_that_holds_no_keys_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv(RANK_VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{RANK_VARIABLE} must be what opd run"):
        rank_keys(Path("nowhere"))


def test_the_variable_of_old_names_the_new_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(RETIRED_VARIABLE, "x" * 20)
    with pytest.raises(ValueError, match=f"{RETIRED_VARIABLE} is no longer read.*{FILE_VARIABLE}"):
        named_file()
    with pytest.raises(ValueError, match=RETIRED_VARIABLE):
        rank_keys(Path("nowhere"))
