"""Holds the versions of the weights that sites can pull, and reads ranges of their files.

A version is opened once, when it is offered, by names that its manifest lists; what a site asks for
is looked up among these and never made part of a path. The open files stay readable after the
learner has deleted a version from its directory, for as long as a site may need them.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatron_opd.sites.messages import FileSize, Offer, Want
from megatron_opd.sites.mirror import chain_of, digest_of
from sglang_bridge.errors import one_line
from sglang_bridge.weights.manifest import MANIFEST, MAX_BYTES, decode

MAX_RANGE_BYTES = 16 << 20
"""Largest range that a site may ask for at once."""


class VersionRemoved(LookupError):
    """Reports a version that the store does not hold, or not any more."""


class BadWant(ValueError):
    """Reports in one line why no site would ask so."""


@dataclass(frozen=True, slots=True)
class _OpenVersion:
    """Holds an offered version. handles: of its files, open, by their names."""

    offer: Offer
    handles: Mapping[str, int]


class VersionStore:
    """Holds open the files of the offered versions, oldest first."""

    def __init__(self) -> None:
        self._versions: dict[str, _OpenVersion] = {}
        self._lock = threading.Lock()

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Returns what can be pulled, oldest first."""
        return tuple(version.offer for version in self._versions.values())

    def add(self, directory: Path, name: str) -> Offer:
        """Open version `name` below `directory` and compute its digests; returns its offer.

        OSError, ValueError: it cannot be read, or is not as its manifest says.
        """
        with ExitStack() as stack:
            opened = _open(stack, directory / name / MANIFEST)
            size = os.fstat(opened).st_size
            if size > MAX_BYTES:
                raise ValueError(f"the manifest of {name} has {size} bytes")
            manifest = decode(os.pread(opened, size, 0), name)
            handles = {MANIFEST: opened}
            for file in manifest.files:
                handles[file.name] = _open(stack, directory / name / file.name)
                found = os.fstat(handles[file.name]).st_size
                if found != file.num_bytes:
                    raise ValueError(f"{file.name} of {name} has {found} bytes, not as written")
            files = [_described(each, handle) for each, handle in handles.items()]
            offer = Offer(manifest.version, name, manifest.base, files)
            stack.pop_all()  # they stay open
        self._versions[name] = _OpenVersion(offer, handles)
        return offer

    def check(self, want: Want) -> None:
        """Raise BadWant for what is in no version, of those that are here."""
        version = self._versions.get(want.name)
        if version is None:
            return
        sizes = {file.name: file.num_bytes for file in version.offer.files}
        if want.file not in sizes:
            raise BadWant(f"{one_line(want.file, 80)!r} is no file of {want.name}")
        if not 0 <= want.start < want.stop <= sizes[want.file]:
            raise BadWant(f"bytes {want.start} to {want.stop} are not in {want.file}")
        if want.stop - want.start > MAX_RANGE_BYTES:
            raise BadWant(f"{want.stop - want.start} bytes at once are more than {MAX_RANGE_BYTES}")

    def read(self, want: Want) -> bytes:
        """Return what a site asks for. VersionRemoved: it was removed. BadWant. OSError: disk.

        May be called in a thread.
        """
        self.check(want)
        with self._lock:  # or another file may have got the number of one that was closed
            version = self._versions.get(want.name)
            if version is None:
                raise VersionRemoved(one_line(want.name, 80))
            data = os.pread(version.handles[want.file], want.stop - want.start, want.start)
        if len(data) != want.stop - want.start:
            raise OSError(f"{want.file} of {want.name} was cut short")
        return data

    def keep(self, versions: Collection[str]) -> None:
        """Close all but the newest version, `versions`, and what these are based on."""
        bases = {name: each.offer.base for name, each in self._versions.items()}
        roots = {*versions, *list(self._versions)[-1:]}
        kept = {name for root in roots for name in chain_of(root, bases)}
        self._drop([name for name in self._versions if name not in kept])

    def close(self) -> None:
        """Close all of them."""
        self._drop(list(self._versions))

    def _drop(self, names: Collection[str]) -> None:
        with self._lock:
            for name in names:
                for handle in self._versions.pop(name).handles.values():
                    os.close(handle)


def _open(stack: ExitStack, path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    stack.callback(os.close, handle)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise ValueError(f"{path} is no plain file")
    return handle


def _described(name: str, handle: int) -> FileSize:
    with os.fdopen(handle, "rb", closefd=False) as file:
        digest = digest_of(file)
        return FileSize(name, file.tell(), digest)
