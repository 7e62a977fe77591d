"""A learner of one rank for tests: it holds a checkpoint and writes versions to a directory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_opd.models.spec import read_model_spec
from megatron_opd.models.views import View
from megatron_opd.weight_sync import disk_writer
from megatron_opd.weight_sync.disk import Disk
from megatron_opd.weight_sync.disk_writer import DiskWriter
from megatron_opd.weight_sync.holdings import server_holdings
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import WeightPiece
from sglang_bridge.weights.digest import as_text, slice_digest


class DiskLearner:
    """Holds Hugging Face tensors; implements weight_sync.session.DigestingLearner."""

    def __init__(
        self, patch: pytest.MonkeyPatch, model: Path, tensors: dict[str, torch.Tensor]
    ) -> None:
        self.tensors, self._changes = tensors, 0
        spec = read_model_spec(model)
        views = {
            held.name: [View(held.name, held.dim, 0, tensors[held.name])]
            for held in server_holdings(spec, 1, 1)
        }
        patch.setattr(disk_writer, "views_by_name", lambda *_: views)
        world = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
        self.full: Any = SimpleNamespace(world=world, spec=spec, shards={})

    def asks(self, writer: DiskWriter) -> Callable[[bytes], Awaitable[bytes]]:
        """What hands requests to this learner's part."""

        async def ask(request: bytes) -> bytes:
            return writer.handle(request)

        return ask

    def change_one_row(self) -> None:
        """What a small update leaves of a change, in every tensor."""
        self._changes += 1
        for tensor in self.tensors.values():
            tensor[self._changes] += 0.25

    async def write(self, disk: Disk, version: int) -> None:
        """Write a version that no server is told of yet."""
        await disk._write(version)

    async def piece_digests(self, pieces: Sequence[WeightPiece]) -> list[str]:
        """What the same slices here have."""
        return [
            as_text(
                slice_digest(
                    self.tensors[p.hf_name].narrow(p.dim, p.start, p.length), p.dim, p.start
                )
            )
            for p in pieces
        ]


async def relabel(fleet: Fleet, version: int) -> None:
    """Call what the servers hold this version."""
    await fleet.pause("retract")
    await fleet.begin_weight_update()
    await fleet.end_weight_update(version)
    await fleet.resume()


def flip_the_last_bit(directory: Path, version: int) -> None:
    """Damage the only file of a version."""
    (file,) = directory.glob(f"run-*/*-version-{version}/rank00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
