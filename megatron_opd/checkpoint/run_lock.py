"""Lets one controller at a time own a run directory, and its writers prove it. Torch-free.

`run.lock` is locked with flock for as long as the controller lives: however it ends, the kernel
releases the lock (over NFS the server does), so a file that is left behind blocks nobody. The file
names the holder and holds a random token. A writer elsewhere (a learner's rank) compares the token
that its controller told it with the file's before it gives anything a name: a writer left over from
an earlier controller finds another token, or none, and writes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

LOCK = "run.lock"
MAX_SHOWN = 255
_TOKEN = re.compile(r"[0-9a-f]{16,255}")
_HELD = (errno.EAGAIN, errno.EACCES)


class RunDirHeld(ValueError):
    """Reports in one line which other controller holds the run directory."""


class NotTheHolder(RuntimeError):
    """Reports in one line that a writer does not belong to the holder of the run directory."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Holds what `run.lock` says. started: local time with offset. token: random, hexadecimal."""

    pid: int
    host: str
    started: str
    token: str


@dataclass(frozen=True, slots=True)
class LockClaim:
    """Grants the right to write into a run directory. lock: its run.lock, as seen from here."""

    lock: Path
    token: str

    def check(self) -> None:
        """Raise NotTheHolder if the directory is not, or no longer, its controller's."""
        held = read_holder(self.lock)
        if held is None:
            raise NotTheHolder(
                f"{self.lock} is missing or not readable, so nothing is written: every rank must "
                "see the same run.dir of a running controller, or checkpoint.every and "
                "checkpoint.every_minutes must be 0"
            )
        if not secrets.compare_digest(held.token, self.token):
            raise NotTheHolder(
                f"{self.lock.parent} now belongs to pid {held.pid} on {held.host}, started "
                f"{held.started}: nothing of an earlier run is written into it"
            )


class RunLock:
    """Holds a lock; `release` ends it, and so does the end of this process."""

    def __init__(self, handle: int, path: Path, holder: Holder, made: tuple[Path, ...]) -> None:
        self._handle, self._made = handle, made
        self.path, self.holder = path, holder

    @classmethod
    def take(cls, run_dir: Path) -> RunLock:
        """Lock `run_dir`, which is made if it is missing.

        RunDirHeld: another process holds it. OSError: it cannot be made, or locked.
        """
        made = tuple(part for part in (run_dir, *run_dir.parents) if not part.exists())
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir.absolute() / LOCK
        handle = _locked(path)
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = Holder(os.getpid(), socket.gethostname(), started, secrets.token_hex(32))
        os.ftruncate(handle, 0)
        os.fchmod(handle, 0o600)  # also where a copied run left the file open to all
        os.pwrite(handle, json.dumps(asdict(holder)).encode(), 0)
        os.fsync(handle)
        return cls(handle, path, holder, made)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def claim(self) -> LockClaim:
        """Returns the claim that this process, and whoever it tells, writes with."""
        return LockClaim(self.path, self.holder.token)

    def release(self) -> None:
        """Release the lock. A directory that taking it made, if still empty, is removed too."""
        if self._handle < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self._handle)):
                self.path.unlink()  # still held, so no other process's
        os.close(self._handle)
        self._handle = -1
        for directory in self._made:
            try:
                directory.rmdir()
            except OSError:
                break  # not empty: something was put there


def refuse_if_held(run_dir: Path) -> None:
    """Raise RunDirHeld if another process holds `run_dir`. Changes nothing."""
    path = run_dir / LOCK
    if path.is_file():
        os.close(_locked(path))


def read_holder(path: Path) -> Holder | None:
    """Return who holds, or held, the lock; None: it is not known."""
    try:
        raw = json.loads(path.read_bytes())
        held = Holder(raw["pid"], raw["host"], raw["started"], raw["token"])
        sound = type(held.pid) is int and held.pid > 0 and _TOKEN.fullmatch(held.token)
        # both are printed
        shown = [
            text.isprintable() and len(text) <= MAX_SHOWN for text in (held.host, held.started)
        ]
        return held if sound and all(shown) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _locked(path: Path) -> int:
    """Open and lock the file of this name."""
    while True:
        # not inherited by child processes, which would hold the lock after this one's end; not
        # through a link, because the file that it names would be emptied
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(handle)):
                return handle
        except OSError as error:
            os.close(handle)
            if error.errno not in _HELD:
                raise
            raise RunDirHeld(_held_line(path)) from None
        os.close(handle)  # its holder removed it between our two steps: take the new one


def _held_line(path: Path) -> str:
    held = read_holder(path)
    by = (
        "another process"
        if held is None
        else f"pid {held.pid} on {held.host}, started {held.started}"
    )
    return f"run.dir {path.parent} is held by {by}; stop that run or choose another run.dir"
