"""What stands in run.lock, which any writer of the directory may have put there."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from random import Random

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_json
from checks.fuzz.places import written
from megatron_opd.checkpoint.run_lock import (
    LOCK,
    Holder,
    LockClaim,
    NotTheHolder,
    RunDirHeld,
    RunLock,
    read_holder,
)

TOKEN = "0123456789abcdef" * 4
LEAST, MOST = 16, 255  # characters of a token
VALID = {"pid": 123, "host": "node-1", "started": "2026-01-02 03:04:05 +0000", "token": TOKEN}


@dataclass(frozen=True)
class Read:
    """What a writer and a second controller make of the file."""

    holder: Holder | None
    may_write: bool


def call(content: bytes) -> Read:
    """All readers of the file; the second controller is refused, since the lock is held."""
    path = written(LOCK, content)
    holder = read_holder(path)
    try:
        LockClaim(path, TOKEN).check()
        may_write = True
    except NotTheHolder as error:
        may_write = False
        _printable(str(error))
    lock = RunLock.take(path.parent)
    try:
        path.write_bytes(content)
        RunLock.take(path.parent).release()
        raise AssertionError("two controllers hold one directory")
    except RunDirHeld as error:
        _printable(str(error))
    finally:
        os.close(lock._handle)  # pyright: ignore[reportPrivateUsage]
    return Read(holder, may_write)


def _printable(text: str) -> None:
    if not text.isprintable() or len(text) > 2000:
        raise AssertionError(f"no line for a terminal: {text[:200]!r}")


def oracle(content: bytes, read: Read) -> str | None:
    """Only a whole record names a holder, and only its token lets anyone write."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        tree = None
    holder = read.holder
    if read.may_write and not (isinstance(tree, dict) and tree.get("token") == TOKEN):
        return "a writer is let in without the token"
    if holder is None:
        whole = tree == VALID and type(tree["pid"]) is int  # 123.0 equals 123
        return "a whole record is not read" if whole else None
    assert isinstance(tree, dict)
    if type(tree["pid"]) is not int or tree["pid"] < 1 or holder.pid != tree["pid"]:
        return "a pid that is none"
    if any(not isinstance(tree[key], str) for key in ("host", "started", "token")):
        return "a field of another type"
    if not holder.token.isascii() or not LEAST <= len(holder.token) <= MOST:
        return "a token that is none"
    return None


MAKE = damaged_json([VALID])


def make(rng: Random) -> bytes:
    """The file, damaged."""
    return MAKE(rng) if rng.random() < 0.98 else json.dumps(VALID).encode()


# each input is synced to the disk
TARGET = Target("run_lock", make, call, (ValueError,), oracle, share=0.25)
