"""Keeps a run's checkpoints in directories `step-UPDATES`, each complete or absent. Torch-free.

    step-000120/  manifest.json  controller.msgpack  run.json  learner/...
    step-000160.part/            being written, or left by a run that was killed while writing

Invariant: a directory gets its final name in one step, after every file in it and its manifest are
on disk; it loses that name before any of its files is removed. So whoever finds the name finds all
of it, at any moment and after any crash.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opd.checkpoint.part_dir import sync_directory, write_synced
from megatron_opd.checkpoint.state_files import (
    FileSum,
    check_size,
    file_sum,
    read_json,
    sum_file,
)
from megatron_opd.config.wording import shown

FORMAT = 2
MANIFEST, LEARNER = "manifest.json", "learner"
_COMPLETE = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class StepDirs:
    """Manages the checkpoints in `root`, a directory that may hold other files too."""

    root: Path

    def path(self, updates: int) -> Path:
        """Return where the checkpoint after `updates` updates is once it is complete."""
        return self.root / step_name(updates)

    def part(self, updates: int) -> Path:
        """Return where it is while it is written."""
        return self.root / f"step-{updates:06d}.part"

    def complete(self) -> list[int]:
        """Return the updates of the complete checkpoints, rising."""
        names = [entry.name for entry in self.root.glob("step-*")]
        return sorted(int(m.group(1)) for name in names if (m := _COMPLETE.fullmatch(name)))

    def torn(self) -> list[Path]:
        """Return what was being written, or removed, when a run ended."""
        return sorted(self.root.glob("step-*.part"))

    def discard(self, torn: Path) -> None:
        """Remove what was not completely written, or not completely removed."""
        assert torn in self.torn(), torn
        shutil.rmtree(torn)

    def start(self, updates: int) -> Path:
        """Make an empty directory to write to."""
        part = self.part(updates)
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
        return part

    def publish(self, updates: int, summed: list[str]) -> Path:
        """Write the manifest and give the directory its name.

        summed: files that get a checksum here; the learner's have theirs already. A checkpoint of
        this name (from before an earlier resumption) is replaced.
        """
        part, final = self.part(updates), self.path(updates)
        names = [p.relative_to(part).as_posix() for p in sorted(part.rglob("*")) if p.is_file()]
        sums = [sum_file(part, name) for name in summed]
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "updates": updates,
            "sizes": {name: (part / name).stat().st_size for name in names},
            "crc32": {entry.name: entry.crc32 for entry in sums},
        }
        write_synced(part / MANIFEST, json.dumps(manifest, indent=1))
        if final.exists():
            self.remove(updates)
        part.rename(final)
        sync_directory(self.root)
        return final

    def remove(self, updates: int) -> None:
        """Remove a complete checkpoint."""
        doomed = self.root / f"step-{updates:06d}.old.part"
        if doomed.exists():
            shutil.rmtree(doomed)
        self.path(updates).rename(doomed)
        sync_directory(self.root)
        shutil.rmtree(doomed)

    def rotate(self, keep_last: int, keep_every: int, besides: Collection[int] = ()) -> list[int]:
        """Remove all but the newest `keep_last`, the multiples of `keep_every`, and `besides`.

        keep_every: 0: of none.
        """
        doomed = [
            updates
            for updates in self.complete()[:-keep_last]
            if not (keep_every and updates % keep_every == 0) and updates not in besides
        ]
        for updates in doomed:
            self.remove(updates)
        return doomed


def verify(path: Path) -> None:
    """Check the manifest of a complete checkpoint against its files.

    Every size, and the checksum of every file but the learner's shards, which the learner checks
    when it loads them. ValueError: something is missing or differs; the line names it.
    """
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {path} was written by another version: its format must be {FORMAT}, got "
            f"{shown(manifest.get('format'))}"
        )
    if path.name != step_name(manifest.get("updates")):
        raise ValueError(
            f"checkpoint {path} was renamed: it is the one after "
            f"{shown(manifest.get('updates'))} updates"
        )
    sizes = _table(path, manifest, "sizes")
    for name, size in sizes.items():
        check_size(path, _entry(path, name, size, 0))
    for name, crc32 in _table(path, manifest, "crc32").items():
        entry = _entry(path, name, sizes.get(name), crc32)
        if sum_file(path, name) != entry:
            raise ValueError(
                f"checkpoint {path} is damaged: {name} does not have the checksum it was "
                "written with"
            )


def _entry(path: Path, name: str, size: Any, crc32: Any) -> FileSum:
    try:
        return file_sum(name, size, crc32)
    except ValueError as error:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST}: {error}") from None


def step_name(updates: Any) -> str:
    """Return the name of the complete checkpoint after `updates` updates."""
    return f"step-{updates:06d}" if type(updates) is int else ""


def _table(path: Path, manifest: dict[str, Any], key: str) -> dict[str, Any]:
    found = manifest.get(key)
    if not isinstance(found, dict):
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} has no table {key!r}")
    return found  # pyright: ignore[reportUnknownVariableType]
