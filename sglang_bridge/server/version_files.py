"""Opens versions of weights: plain files below one directory, checked as they are read.

No symbolic link below that directory is followed, no name leads out of it, and nothing is allocated
by a number that a file holds before the file's true size allows it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from sglang_bridge.weights.manifest import (
    MANIFEST,
    MAX_BYTES,
    Array,
    BadManifest,
    File,
    Manifest,
    checksum,
    decode,
    rows_of_chunk,
)

POLL_S = 0.05
ANEW = "the weights must be written anew, which a run does with its next whole version"
SEES = "let weight_sync.directory of the learner and of this server be one directory"
Opened = TypeVar("Opened")


class BadVersion(ValueError):
    """Reports in one line which file of weights cannot be read, why, and the remedy."""


class _NotYet(Exception):
    """Reports that a file is not there, or not all of it."""


class VersionFile:
    """Reads one file of a version, of which nothing is trusted unchecked. See `Version.file`."""

    def __init__(self, handle: int, path: Path, record: File) -> None:
        self._handle, self.path = handle, path
        self.num_read = 0
        if checksum(self._bytes(0, memoryview(bytearray(record.head_bytes)))) != record.head_sum:
            raise BadVersion(f"{path}: its head is not what was written: {ANEW}")

    def rows(self, array: Array, first: int, count: int) -> Iterator[tuple[int, memoryview]]:
        """Yield (row, bytes of whole rows from it on), in order, of `count` rows from `first` on.

        The bytes are valid until the next ones are asked for. BadVersion: they are not those that
        were written.
        """
        step, size = rows_of_chunk(array.row_bytes), array.row_bytes
        chunk = memoryview(bytearray(min(step, array.rows) * size))
        end = first + count
        for index in range(first // step, -(-end // step)):
            row = index * step
            at, held = array.at + row * size, min(step, array.rows - row)
            data = self._bytes(at, chunk[: held * size])
            if checksum(data) != array.sums[index]:
                raise BadVersion(
                    f"{self.path}: bytes {at} to {at + len(data)} are not those that were "
                    f"written: {ANEW}"
                )
            begin, stop = max(first, row), min(end, row + held)
            yield begin, data[(begin - row) * size : (stop - row) * size]

    def numbers(self, array: Array, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
        """Return `count` numbers of an array of one a row, from number `first` on."""
        found = torch.empty(count, dtype=dtype)
        for row, data in self.rows(array, first, count):
            part = torch.frombuffer(data, dtype=dtype)
            found[row - first : row - first + len(part)] = part
        return found

    def _bytes(self, at: int, into: memoryview) -> memoryview:
        """Fill `into` from byte `at` on."""
        done = 0
        while done < len(into):
            try:
                more = os.preadv(self._handle, [into[done:]], at + done)
            except OSError as error:
                raise BadVersion(f"{self.path}: {_said(error)}: {ANEW}") from error
            if more == 0:
                raise BadVersion(f"{self.path} was cut short at byte {at + done}: {ANEW}")
            done += more
        self.num_read += done
        return into


class Version:
    """Holds one version open. See `open_version`."""

    def __init__(
        self, place: int, path: Path, manifest: Manifest, stack: ExitStack, until: float
    ) -> None:
        self.manifest = manifest
        self._place, self._path, self._stack, self._until = place, path, stack, until
        self._files: dict[str, VersionFile] = {}

    @property
    def num_read(self) -> int:
        """Returns the bytes that were read of its files."""
        return sum(file.num_read for file in self._files.values())

    def file(self, record: File) -> VersionFile:
        """Open a file of it, once. BadVersion: it is not there, or not as it was written."""
        if record.name not in self._files:
            path = self._path / record.name

            def attempt() -> int:
                handle = _open(self._place, path, os.O_NONBLOCK)
                self._stack.callback(os.close, handle)
                _require_size(handle, path, record.num_bytes)
                return handle

            handle = _patiently(attempt, self._until)
            self._files[record.name] = VersionFile(handle, path, record)
        return self._files[record.name]


@contextmanager
def open_version(root: Path, stream: str, name: str, wait_s: float) -> Iterator[Version]:
    """Open version `name` of the run's directory `stream` below `root`; both names are checked.

    wait_s: how long its files may take to appear, on a file system that shows them late.
    BadVersion: they do not, or they are damaged, or not plain files below `root`.
    """
    until, path = time.monotonic() + wait_s, root / stream / name
    with ExitStack() as stack:

        def attempt() -> tuple[int, Manifest]:
            place = _directory(stack, root, stream, name)
            return place, _manifest(place, path / MANIFEST, name)

        place, manifest = _patiently(attempt, until)
        yield Version(place, path, manifest, stack, until)


def require_stream(root: Path, stream: str, wait_s: float) -> None:
    """Wait until the run's directory `stream` is there. BadVersion: it does not appear."""
    with ExitStack() as stack:
        _patiently(lambda: _directory(stack, root, stream), time.monotonic() + wait_s)


def _patiently(attempt: Callable[[], Opened], until: float) -> Opened:
    """Return what `attempt` opens, as soon as it can."""
    while True:
        try:
            return attempt()
        except _NotYet as error:
            if time.monotonic() >= until:
                raise BadVersion(str(error)) from error
        time.sleep(POLL_S)


def _directory(stack: ExitStack, root: Path, *parts: str) -> int:
    """Open a directory below `root`, one name at a time."""
    path = root
    try:
        place = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadVersion(f"{root}: {_said(error)}: {SEES}") from error
    stack.callback(os.close, place)
    for part in parts:
        path = path / part
        place = _open(place, path, os.O_DIRECTORY)
        stack.callback(os.close, place)
    return place


def _open(place: int, path: Path, flag: int) -> int:
    """Open the last name of `path` in the open directory `place`; no symbolic link."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flag
        return os.open(path.name, flags, dir_fd=place)
    except FileNotFoundError as error:
        raise _NotYet(f"{path} is not there: {SEES}") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise BadVersion(
                f"{path} is a symbolic link or no directory, and neither is followed: put the "
                "weights themselves there"
            ) from error
        raise BadVersion(f"{path}: {_said(error)}: let the server's user read it") from error


def _require_size(handle: int, path: Path, expected: int | None) -> int:
    """Return the size of a plain file. expected: its size; None: at most a manifest's."""
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise BadVersion(f"{path} is no plain file: put the weights themselves there")
    size = found.st_size
    if expected is not None and size < expected:
        raise _NotYet(f"{path} was cut short, it has {size} of {expected} bytes: {ANEW}")
    if size > (MAX_BYTES if expected is None else expected):
        limit = f"at most {MAX_BYTES}" if expected is None else str(expected)
        raise BadVersion(f"{path} has {size} bytes instead of {limit}: {ANEW}")
    return size


def _manifest(place: int, path: Path, name: str) -> Manifest:
    handle = _open(place, path, os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as stream:
        size = _require_size(handle, path, None)
        try:
            return decode(stream.read(size), name)
        except BadManifest as error:
            raise BadVersion(f"{path}: {error}: {ANEW}") from error
        except OSError as error:
            raise BadVersion(f"{path}: {_said(error)}: {ANEW}") from error


def _said(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
