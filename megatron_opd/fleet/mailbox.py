"""Carries commands to a run under way, and its answers back, as files in run.dir/fleet.

A command is written under a name that nobody else uses, and renamed to ID.request; the run removes
it, and renames its answer to ID.answer, which the command removes. So neither side reads half a
file, nothing listens anywhere, and a command may be given on every machine that sees run.dir. The
directory is the run's user's alone (mode 700) and lasts as long as the run.

Files are data, JSON of known fields, and at most MAX_BYTES long.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from sglang_bridge.errors import one_line

DIRECTORY = "fleet"
MAX_BYTES = 1 << 20
REQUEST, ANSWER = ".request", ".answer"
_NAME = re.compile(r"[0-9a-f]{32}")


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks a run to list, add or remove servers. url, role: see `opd fleet`."""

    action: Literal["list", "add", "remove"]
    url: str = ""
    role: str = ""


class ServerRow(msgspec.Struct, frozen=True):
    """Describes one server of a run now.

    version: of its weights, null while it is lost. tokens_per_s: sampled or scored since the last
    listing, or since it joined.
    """

    role: str
    url: str
    state: str
    version: int | None
    in_flight: int
    restarts: int
    tokens_per_s: float | None


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds one line for the user, of what was done or (failed) why it was not, or a listing."""

    line: str = ""
    failed: bool = False
    servers: tuple[ServerRow, ...] = ()


class BadMailboxFile(ValueError):
    """Reports a file that is no command, or no answer."""


class Mailbox:
    """Holds a run's end: `open`, `commands` and `answer` until `close`. OSError: see there."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / DIRECTORY

    def open(self) -> None:
        """Make the directory, without what an earlier run left there."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(mode=0o700)

    def commands(self) -> Iterator[tuple[str, Command | BadMailboxFile]]:
        """Yield the commands that arrived, each once, with its name."""
        for name in sorted(os.listdir(self._path)):
            stem = name.removesuffix(REQUEST)
            if name.endswith(REQUEST) and _NAME.fullmatch(stem):
                try:
                    raw = _taken(self._path / name)
                    yield stem, msgspec.json.decode(raw, type=Command)
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    yield stem, BadMailboxFile(f"not a command: {one_line(str(error))}")
                except FileNotFoundError:
                    continue  # its sender has taken it back

    def answer(self, name: str, answer: Answer) -> None:
        """Send an answer to the command of this name."""
        _put(self._path, name, ANSWER, msgspec.json.encode(answer))

    def close(self) -> None:
        """Remove the directory: who waits for an answer knows that the run has ended."""
        shutil.rmtree(self._path, ignore_errors=True)


class Sender:
    """Holds a command's end. OSError: the run's directory is not there, or not its user's."""

    def __init__(self, run_dir: Path, command: Command) -> None:
        self._path, self._name = run_dir / DIRECTORY, secrets.token_hex(16)
        _put(self._path, self._name, REQUEST, msgspec.json.encode(command))

    def answer(self) -> Answer | None:
        """Return the answer; None: there is none yet. BadMailboxFile: it is none of ours."""
        try:
            raw = _taken(self._path / f"{self._name}{ANSWER}")
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(raw, type=Answer)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadMailboxFile(f"not an answer: {one_line(str(error))}") from None

    def take_back(self) -> None:
        """Remove a command that was not taken yet."""
        with contextlib.suppress(OSError):
            (self._path / f"{self._name}{REQUEST}").unlink()


def _put(directory: Path, name: str, ending: str, raw: bytes) -> None:
    """Write a file that appears whole."""
    hidden = directory / f".{name}{ending}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(hidden, flags, 0o600), "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(directory / f"{name}{ending}")


def _taken(path: Path) -> bytes:
    """Read a file and remove it. BadMailboxFile: it is not a small file of this user."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        _remove(path)
        raise BadMailboxFile(error.strerror) from None
    with os.fdopen(handle, "rb") as file:
        _remove(path)
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise BadMailboxFile("not a file of the run's user")
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise BadMailboxFile(f"more than {MAX_BYTES} bytes")
    return raw


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()
