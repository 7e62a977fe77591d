"""Versions of weights on disk without a learner or a server: ranks of both as plain objects."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from megatron_opd.models.views import View
from megatron_opd.weight_sync.disk_files import write_file
from megatron_opd.weight_sync.disk_slices import Slices
from megatron_opd.weight_sync.disk_versions import Stream
from megatron_opd.weight_sync.holdings import Held
from sglang_bridge.server.disk_reader import DiskReader
from sglang_bridge.server.pieces import Piece
from sglang_bridge.weights.digest import BITS
from sglang_bridge.weights.exchange import as_it_is
from sglang_bridge.weights.manifest import File, Manifest, Opening
from tests.support.receiving import canvas_of

RUN = "run-0123456789ab"
# rows of "a" and columns of "b" are cut, "n" is whole everywhere
SHAPES: dict[str, tuple[int, ...]] = {"a": (12, 6), "b": (5, 8), "n": (7,)}
DIMS = {"a": 0, "b": 1, "n": 0}
Tensors = dict[str, torch.Tensor]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers as whole numbers, which compare NaN and -0.0 too."""
    return tensor.contiguous().view(BITS[tensor.dtype.itemsize])


def random_bits(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of any bit pattern: NaN with payloads, infinities, -0.0, subnormals."""
    size = 8 * dtype.itemsize
    odd = [0, 1 << (size - 1), 1, (1 << size) - 1]  # 0.0, -0.0, subnormal, NaN
    count = math.prod(shape)
    chosen = [rng.choice([rng.getrandbits(size), rng.choice(odd)]) for _ in range(count)]
    signed = [value - (1 << size) if value >> (size - 1) else value for value in chosen]
    return torch.tensor(signed, dtype=BITS[dtype.itemsize]).view(dtype).view(*shape)


def random_tensors(rng: random.Random, dtype: torch.dtype) -> Tensors:
    return {name: random_bits(rng, shape, dtype) for name, shape in SHAPES.items()}


def randomly_changed(rng: random.Random, tensors: Tensors, share: float) -> Tensors:
    """A copy in which about `share` of the numbers have other bits, of all, some or no tensors."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        other = random_bits(rng, tensor.shape, tensor.dtype)
        changes = rng.choice([0.0, share, share])
        taken = torch.tensor([rng.random() < changes for _ in range(tensor.numel())], dtype=bool)
        found[name] = torch.where(taken.view(tensor.shape), bits_of(other), bits_of(tensor)).view(
            tensor.dtype
        )
    return found


def random_cuts(rng: random.Random, size: int, most: int) -> list[tuple[int, int]]:
    """(start, length) of one to `most` parts that cover `size` indices."""
    inner = sorted(rng.sample(range(1, size), rng.randint(1, most) - 1))
    return [(a, b - a) for a, b in pairwise([0, *inner, size])]


class Writers:
    """Learner ranks that write: rank i holds part i of every tensor that has so many."""

    def __init__(
        self,
        directory: Path,
        cuts: Mapping[str, Sequence[tuple[int, int]]],
        dtype: torch.dtype,
        *,
        delta: bool = True,
    ) -> None:
        self.stream = Stream(directory, RUN)
        self.dtype = dtype
        self.live = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
        self.slices: list[Slices] = []
        for rank in range(max(map(len, cuts.values()))):
            held: list[Held] = []
            views: dict[str, list[View]] = {}
            for name, parts in cuts.items():
                if rank < len(parts):
                    start, length = parts[rank]
                    dim = DIMS[name]
                    held.append(Held(name, SHAPES[name], dim, start, length, (rank,)))
                    view = self.live[name].narrow(dim, start, length)
                    views[name] = [View(name, dim, start, view)]
            self.slices.append(Slices(held, views, dtype, remembers=delta))

    def write(self, name: str, tensors: Tensors, base: str | None = None) -> Manifest:
        """Write a version, as changes of `base` or whole."""
        for key, live in self.live.items():
            live.copy_(tensors[key])
        self.stream.begin(name)
        partial = self.stream.partial(name)
        files: list[File] = []
        for rank, slices in enumerate(self.slices):
            contents = slices.whole(as_it_is) if base is None else slices.changes(as_it_is)
            files.append(write_file(partial / f"rank{rank:05d}.safetensors", contents))
        kind = str(self.dtype).removeprefix("torch.")
        version = int(name.rpartition("-")[2])
        manifest = Manifest(name, version, base, kind, tuple(files))
        self.stream.publish(manifest)
        return manifest


def pieces_of(rank: int, cuts: Mapping[str, Sequence[tuple[int, int]]], dtype: Any) -> list[Piece]:
    """What a server rank holds, in the midst of other memory."""
    held: list[Piece] = []
    for name, parts in cuts.items():
        start, length = parts[rank % len(parts)]
        shape = list(SHAPES[name])
        shape[DIMS[name]] = length
        _, view = canvas_of(shape, dtype)
        held.append(Piece(name, DIMS[name], start, length, view))
    return held


def reader_of(
    held: Sequence[Piece], root: Path, *, staged: Sequence[str] | None = (), wait_s: float = 0.0
) -> DiskReader:
    """A rank's reader, told where versions are."""
    found = DiskReader(held, str(root))
    names = None if staged is None else tuple(staged)
    found.open(msgspec.json.encode(Opening(RUN, names, wait_s)).decode())
    return found


def differing(held: Sequence[Piece], tensors: Tensors) -> list[str]:
    """Names of the pieces that are not, bit for bit, their slice of `tensors`."""
    wanted = {p.hf_name: tensors[p.hf_name].narrow(p.dim, p.start, p.length) for p in held}
    return [p.hf_name for p in held if not torch.equal(bits_of(p.view), bits_of(wanted[p.hf_name]))]


def lone_learner(live: Tensors) -> Any:
    """What DiskWriter takes for a learner of one rank; see `hold_whole`."""
    device = torch.device("cpu")
    world = SimpleNamespace(rank=0, size=1, device=device)
    return SimpleNamespace(world=world, spec=None, shards={}, live=live, dtype=torch.float32)


def hold_whole(monkeypatch: Any, live: Tensors) -> None:
    """Let DiskWriter find these tensors in a learner of one rank."""
    from megatron_opd.weight_sync import disk_writer

    held = [Held(n, tuple(t.shape), DIMS[n], 0, t.shape[DIMS[n]], (0,)) for n, t in live.items()]
    views = {name: [View(name, DIMS[name], 0, tensor)] for name, tensor in live.items()}
    monkeypatch.setattr(disk_writer, "learner_holdings", lambda *_: held)
    monkeypatch.setattr(disk_writer, "views_by_name", lambda *_: views)
