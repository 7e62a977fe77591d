"""Digests slices of the learner's weights, to be compared with what the servers hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_opd.models.gather import FullTensors
from megatron_opd.weight_sync.rounding import Format, rounded
from sglang_bridge.digest import digest
from sglang_bridge.protocol import WeightPiece


def piece_digests(
    full: FullTensors, pieces: Sequence[WeightPiece], round_to: Format | None = None
) -> list[str]:
    """Return digests of slices of the current weights, in order; empty on ranks other than 0.

    Collective. round_to: the servers hold weights of this precision. KeyError: a piece of a tensor
    that the model does not have.
    """
    wanted: dict[str, list[int]] = {}
    for index, piece in enumerate(pieces):
        wanted.setdefault(piece.hf_name, []).append(index)
    found: dict[int, str] = {}
    for name, tensor in full.tensors():
        for index in wanted.pop(name, []):
            found[index] = _digest(rounded(name, tensor, round_to), pieces[index])
    if full.world.rank == 0 and wanted:
        raise KeyError(f"the learner has no tensor named {min(wanted)}")
    return [found[index] for index in sorted(found)]


def _digest(tensor: torch.Tensor, piece: WeightPiece) -> str:
    """Digest the slice's bytes in row-major order, in the dtype in which the server holds it."""
    view = tensor.narrow(piece.dim, piece.start, piece.length)
    held = view.to("cpu", getattr(torch, piece.dtype)).contiguous()
    return digest(held.view(torch.uint8).numpy())
