"""Files in run.dir/fleet -> commands to a run under way, and its answers."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from checks.fuzz.engine import Target
from checks.fuzz.mutations import TEXTS, damaged_json
from checks.fuzz.places import scratch
from megatron_opd.fleet.mailbox import (
    DIRECTORY,
    MAX_BYTES,
    Answer,
    BadMailboxFile,
    Command,
    Mailbox,
    Sender,
)

NAME = "0123456789abcdef" * 2
COMMANDS = (
    *({"action": "add", "url": "http://h:1", "role": "student"}, {"action": "list"}),
    {"action": "remove", "url": "http://h:1"},
)
ROW = ("student", "http://h:1", "serving", 3, 7, 0, 99.5)
FIELDS = ("role", "url", "state", "version", "in_flight", "restarts", "tokens_per_s")
ANSWERS = (
    *({"line": "added http://h:1"}, {"line": "no such server", "failed": True}),
    {"servers": [dict(zip(FIELDS, ROW, strict=True))]},
)
Given = tuple[str, str, bytes]
"""Which end reads it, the file's name without its ending, and what it holds."""


@cache
def mailbox() -> Mailbox:
    """The one of this process."""
    made = Mailbox(scratch())
    made.open()
    return made


def call(given: Given) -> Command | Answer:
    """Read the file as a run does, or as `opd fleet` does."""
    end, name, data = given
    box, directory = mailbox(), scratch() / DIRECTORY
    if end == "command":
        _write(directory / f"{name}.request", data)
        found = [what for _, what in box.commands()]
        for left in directory.iterdir():
            left.unlink()
        if not found:
            raise BadMailboxFile("no command")
        if isinstance(found[0], BadMailboxFile):
            raise found[0]
        return found[0]
    sender: Any = object.__new__(Sender)
    sender._path, sender._name = directory, NAME
    _write(directory / f"{NAME}.answer", data)
    answer = sender.answer()
    assert answer is not None
    assert not any(directory.iterdir()), "an answer that was read is still there"
    return answer


def _write(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def oracle(given: Given, found: Command | Answer) -> str | None:
    """It is what the file says, of a file that has a command's name."""
    end, name, data = given
    try:
        tree = json.loads(data.decode("utf-8", "replace"))
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        return "a file that says nothing"
    if len(data) > MAX_BYTES:
        return "a file that is too large"
    if isinstance(found, Command):
        if end != "command" or len(name) != 32 or set(name) - set("0123456789abcdef"):
            return "a command of another name"
        said = (tree.get("action"), tree.get("url", ""), tree.get("role", ""))
        return None if (found.action, found.url, found.role) == said else "another command"
    if (found.line, found.failed) != (tree.get("line", ""), tree.get("failed", False)):
        return "another answer"
    rows = tree.get("servers", [])
    return None if len(rows) == len(found.servers) else "another listing"


MAKERS = {"command": damaged_json(COMMANDS), "answer": damaged_json(ANSWERS)}
NAMES = (*[NAME] * 12, NAME[:-1], NAME + "0", NAME.upper(), "g" * 32, NAME[:-1] + "\n", "." + NAME)


def make(rng: Random) -> Given:
    """A file of either end, mostly damaged; now and then of another name, or too large."""
    end = rng.choice(list(MAKERS))
    data = MAKERS[end](rng)
    if rng.random() < 0.01:
        data = data + b" " * MAX_BYTES
    if rng.random() < 0.05:
        data = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
    return end, rng.choice(NAMES), data


TARGET = Target("fleet_mail", make, call, (BadMailboxFile,), oracle)
