"""Keeps the directory of one run's versions: each appears whole or not at all, old ones go.

While it is written a version is called NAME.partial, while it is deleted NAME.removed. Nothing is
ever deleted that has another name than these. Rank 0 of the learner alone changes names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from megatron_opd.checkpoint.part_dir import sync_directory, write_synced
from sglang_bridge.weights.manifest import MANIFEST, STREAM, VERSION, Manifest, encode

PARTIAL, REMOVED = ".partial", ".removed"
OWNER = "owner"
MAX_OWNER_BYTES = 1 << 16


class Stream:
    """Represents the directory of one run's versions below `directory`, weight_sync.directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory.absolute()
        self.path = self._directory / name

    def make(self, owner: str) -> None:
        """Make it, and remove those of earlier runs of the same owner. OSError: it cannot."""
        self._directory.mkdir(exist_ok=True)
        for entry in sorted(self._directory.iterdir()):
            ours = STREAM.fullmatch(entry.name) and not entry.is_symlink()
            if ours and _owner(entry) == owner:
                shutil.rmtree(entry)
        self.path.mkdir()
        write_synced(self.path / OWNER, owner)
        sync_directory(self._directory)

    def partial(self, version: str) -> Path:
        """Return where a version's files are written."""
        return self.path / f"{version}{PARTIAL}"

    def begin(self, version: str) -> None:
        """Make the directory in which all ranks write a version."""
        self.partial(version).mkdir()

    def publish(self, manifest: Manifest) -> None:
        """Give a version its name, once all of it is on the disk."""
        partial = self.partial(manifest.name)
        write_synced(partial / MANIFEST, encode(manifest))
        partial.rename(self.path / manifest.name)
        sync_directory(self.path)

    def keep(self, versions: Collection[str]) -> None:
        """Remove all other versions, and what a failure left of one."""
        for entry in sorted(self.path.iterdir()):
            name = entry.name.removesuffix(PARTIAL).removesuffix(REMOVED)
            if VERSION.fullmatch(name) is None or entry.name in versions:
                continue
            gone = entry
            if entry.name == name:  # nobody may see half of it under its own name
                gone = entry.rename(entry.with_name(f"{name}{REMOVED}"))
            # a network file system keeps what a reader has open: that goes the next time
            shutil.rmtree(gone, ignore_errors=True)

    def remove(self) -> None:
        """Remove it with all its versions, as far as it can: a run does not fail at its end."""
        with contextlib.suppress(OSError):
            self.keep(())
            (self.path / OWNER).unlink()
            self.path.rmdir()


def needed(bases: Mapping[str, str | None], keep: int, taken: str | None) -> frozenset[str]:
    """Return which versions must stay readable.

    bases: of every version that is there, the one that it holds the changes of, oldest first. keep:
    how many of the newest stay. taken: the newest that every server holds; None: none yet. With a
    version stays what it is based on.
    """
    names = list(bases)
    first = names.index(taken) if taken is not None and taken in bases else 0
    kept: set[str] = set()
    for name in {*names[-keep:], *names[first:]}:
        base: str | None = name
        while base is not None:
            kept.add(base)
            base = bases[base]
    return frozenset(kept)


def left_behind(directory: Path) -> list[Path]:
    """Return the directories of runs below weight_sync.directory; none where it is not there."""
    try:
        return [entry for entry in sorted(directory.iterdir()) if STREAM.fullmatch(entry.name)]
    except OSError:
        return []


def error_text(error: OSError, path: Path) -> str:
    """Return what went wrong at `path`, or at the path that the error names, and the remedy."""
    where = error.filename or path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{where}: disk full: free some space in weight_sync.directory, or lower "
            "weight_sync.keep_versions"
        )
    said = (error.strerror or str(error)).lower()
    return f"{where}: {said}: weight_sync.directory must be a directory that every rank may change"


def _owner(stream: Path) -> str | None:
    try:
        with open(stream / OWNER, "rb", opener=_no_link) as file:
            return file.read(MAX_OWNER_BYTES).decode(errors="replace")
    except OSError:
        return None


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
