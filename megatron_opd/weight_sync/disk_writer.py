"""Holds the learner's part of the disk transport: every rank writes the slices that are its own.

A version gets its name when all ranks have written, so nobody reads half of one. What fails while
files are written is told in one line, and the learner goes on: the next version is whole then.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from megatron_opd.checkpoint.crew import Crew
from megatron_opd.config.schema import Config
from megatron_opd.models.gather import FullTensors
from megatron_opd.models.ranks import all_gather_json
from megatron_opd.models.views import views_by_name
from megatron_opd.weight_sync.disk_files import Content, write_file
from megatron_opd.weight_sync.disk_messages import DiskRefused, Open, Write, Written, decode, encode
from megatron_opd.weight_sync.disk_plan import writers
from megatron_opd.weight_sync.disk_slices import Slices
from megatron_opd.weight_sync.disk_versions import Stream, error_text, needed
from megatron_opd.weight_sync.holdings import learner_holdings
from megatron_opd.weight_sync.row_maxima import reader
from sglang_bridge.weights.manifest import File, Manifest

SHOWN_S = 60.0
"""Longest wait for a directory that another machine made, which a file system may show late."""
POLL_S = 0.05


class DiskWriter:
    """Writes versions of `full`; implements transport.LearnerPart."""

    def __init__(self, full: FullTensors, config: Config) -> None:
        self.source, self._config = full, config
        self._crew = Crew(full.world.rank, full.world.size, full.world.device)
        self._stream: Stream | None = None
        self._slices: Slices | None = None
        self._dtype = ""
        # of every version that is there, its base; the newest one is the next one's
        self._bases: dict[str, str | None] = {}
        self._since_whole = 0
        self._is_broken = True  # what ranks remember is no version on disk

    def handle(self, request: bytes) -> bytes:
        """Execute one request of disk.Disk, on all ranks alike."""
        try:
            match decode(request):
                case Open() as asked:
                    self._open(asked)
                    return encode(Written(0))
                case Write() as asked:
                    return encode(Written(self._write(asked)))
                case _:
                    raise TypeError("an answer of the learner is no request")
        except ValueError as error:
            return encode(DiskRefused(str(error)))

    def close(self) -> None:
        """Remove what was written: no server needs it any more."""
        stream, self._stream = self._stream, None
        if stream is not None and self._crew.rank == 0:
            stream.remove()

    def _open(self, asked: Open) -> None:
        full, learner, settings = self.source, self._config.learner, self._config.weight_sync
        assert settings.directory is not None, "the configuration requires it"
        stream = self._stream = Stream(settings.directory, asked.stream)
        self._step(stream.path, lambda: stream.make(asked.owner), root_only=True)
        self._step(stream.path, lambda: self._require_seen(stream.path))
        held = learner_holdings(full.spec, learner.parallel, learner.megatron)
        mine = [part for rank, part in writers(held) if rank == full.world.rank]
        views = views_by_name(full.shards.values(), full.spec)
        self._dtype, dtype = asked.dtype, getattr(torch, asked.dtype)
        self._slices = Slices(mine, views, dtype, remembers=settings.delta)
        self._bases, self._is_broken = {}, True

    def _write(self, asked: Write) -> int:
        """Write a version; returns the bytes of all its files. ValueError: it cannot be written."""
        stream, slices, settings = self._stream, self._slices, self._config.weight_sync
        if stream is None or slices is None:
            raise ValueError("versions of weights were asked for before the directory was opened")
        due = self._since_whole + 1 >= settings.full_every
        whole = asked.whole or self._is_broken or not settings.delta or due
        base = None if whole else next(reversed(self._bases))
        read = reader(self.source, settings.round_to)
        self._is_broken = True
        kept = needed(self._bases, settings.keep_versions, asked.taken)
        self._bases = {name: base for name, base in self._bases.items() if name in kept}
        partial = stream.partial(asked.name)

        def begin() -> None:
            stream.keep(kept)
            stream.begin(asked.name)

        self._step(partial, begin, root_only=True)
        try:
            files = self._files(slices.whole(read) if whole else slices.changes(read), partial)
            manifest = Manifest(asked.name, asked.version, base, self._dtype, files)
            self._step(partial, lambda: stream.publish(manifest), root_only=True)
        except ValueError:
            if self._crew.rank == 0:  # its room may be what the next one lacks
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._bases[asked.name], self._is_broken = base, False
        self._since_whole = 0 if whole else self._since_whole + 1
        return manifest.num_bytes

    def _files(self, contents: Sequence[Content], directory: Path) -> tuple[File, ...]:
        """Write this rank's file; return those of all ranks."""
        path = directory / f"rank{self._crew.rank:05d}.safetensors"
        written: list[File] = []
        self._step(path, lambda: written.append(write_file(path, contents)))
        if self._crew.size == 1:
            return tuple(written)
        by_rank = all_gather_json(msgspec.to_builtins(written[0]), self._crew)
        return tuple(msgspec.convert(each, File) for each in by_rank)

    def _require_seen(self, path: Path) -> None:
        until = time.monotonic() + SHOWN_S
        while not path.is_dir():
            if time.monotonic() > until:
                raise ValueError(
                    f"{path} is not there on rank {self._crew.rank}: weight_sync.directory must be "
                    "one directory for all ranks of the learner"
                )
            time.sleep(POLL_S)

    def _step(self, path: Path, work: Callable[[], None], *, root_only: bool = False) -> None:
        """Do `work` on every rank, or on rank 0. ValueError, on all of them: it failed on one."""

        def named() -> None:
            try:
                work()
            except OSError as error:
                raise ValueError(error_text(error, path)) from error

        self._crew.step(named, root_only=root_only)
