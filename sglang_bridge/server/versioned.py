"""Moves weights in memory to a version on disk, from whatever version they are now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from sglang_bridge.server.pieces import Piece
from sglang_bridge.server.stored_slices import Stored, fill, slices_by_name, stored_of
from sglang_bridge.server.version_files import BadVersion, Version, open_version
from sglang_bridge.weights.formats import EXACT_DTYPE
from sglang_bridge.weights.manifest import File, Slice


@dataclass(frozen=True, slots=True)
class Source:
    """Says where versions are: in `stream` below `root`. wait_s: until one has appeared."""

    root: Path
    stream: str
    wait_s: float


class Versioned:
    """Holds memory of some pieces, by name, and the version that lies in it.

    memory: the pieces' own, or shadows of it. version: None: none as a whole.
    """

    def __init__(
        self, pieces: Mapping[str, Piece], memory: Mapping[str, torch.Tensor], source: Source
    ) -> None:
        self._pieces, self._memory, self._source = dict(pieces), dict(memory), source
        self.version: str | None = None
        self.num_read = 0

    def become(self, name: str) -> None:
        """Read version `name`: what changed since the held one, or back to a whole one and on.

        num_read: the bytes that this took. BadVersion: it cannot be read; then nothing, or a
        mixture, is held.
        """
        held, self.version, self.num_read = self.version, None, 0
        if self._memory and name != held:
            with ExitStack() as stack, torch.no_grad():
                chain = self._chain(stack, name, held)
                # all is looked at before the first number is written
                plans = [self._stored(version) for version in chain]
                for version, stored in zip(chain, plans, strict=True):
                    for each in stored:
                        fill(version.file(each.file), each)
                self.num_read = sum(version.num_read for version in chain)
        self.version = name

    def _chain(self, stack: ExitStack, name: str, held: str | None) -> list[Version]:
        """Open the versions that lead from the held one, or from a whole one, to `name`."""
        found: list[Version] = []
        source, base = self._source, name
        while base is not None and base != held:
            opened = open_version(source.root, source.stream, base, source.wait_s)
            found.append(stack.enter_context(opened))
            base = found[-1].manifest.base
        return found[::-1]

    def _stored(self, version: Version) -> list[Stored]:
        """List what `version` stores of these pieces. BadVersion: not all of them."""
        manifest = version.manifest
        listed = slices_by_name(manifest, {p.hf_name for p in self._pieces.values()})
        found: list[Stored] = []
        for name, target in self._memory.items():
            kind = str(target.dtype).removeprefix("torch.")
            piece = self._pieces[name]
            slices = listed.get(piece.hf_name, ())
            if manifest.dtype != kind and not (kind == EXACT_DTYPE and _are_exact(slices)):
                raise BadVersion(
                    f"version {manifest.name} holds {manifest.dtype}, this rank {kind}: serve "
                    "with the dtype of the run's student servers"
                )
            found += stored_of(piece, target, slices, manifest.name)
        return [stored for stored in found if stored.part.form != "same"]


def _are_exact(slices: Iterable[tuple[File, Slice]]) -> bool:
    """Returns whether a tensor is stored in float32, as those are that all servers hold so."""
    return all(_width(part) == 4 for _, part in slices if part.form != "same")


def _width(part: Slice) -> int:
    """Returns the bytes of a stored number."""
    if part.form == "changes":
        return part.arrays[2].row_bytes
    return part.arrays[0].row_bytes * part.shape[part.dim] // prod(part.shape)
