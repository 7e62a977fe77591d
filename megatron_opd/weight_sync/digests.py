"""Digests slices of the learner's weights, to be compared with what the servers hold.

Every rank digests what it holds, on its device: digests of parts add up to that of the whole
(sglang_bridge/weights/digest.py), so nothing is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_opd.models.gather import FullTensors
from megatron_opd.models.views import View
from megatron_opd.weight_sync.quantised import reader_of_held
from sglang_bridge.protocol import WeightPiece
from sglang_bridge.weights.digest import as_text, signed, slice_digest
from sglang_bridge.weights.formats import Format, Grid, is_quantised, scales_of


def piece_digests(
    full: FullTensors,
    pieces: Sequence[WeightPiece],
    round_to: Grid | None = None,
    format: Format | None = None,
    dtype: str = "float32",
) -> list[str]:
    """Return digests of slices of the current weights, in order, on every rank.

    Collective. round_to: the servers hold weights rounded to it. format: they hold matrices
    quantised, and everything else in `dtype`. KeyError: a piece of a tensor that the model does not
    have.
    """
    known = {name for name, *_ in full.manifest()}
    if format is not None:
        known |= {
            scales_of(name) for name, shape, _ in full.manifest() if is_quantised(name, len(shape))
        }
    unknown = {piece.hf_name for piece in pieces} - known
    if unknown:
        raise KeyError(f"the learner has no tensor named {min(unknown)}")
    wanted: dict[str, list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        wanted[piece.hf_name].append(index)
    owned, read = reader_of_held(full, round_to, format, getattr(torch, dtype))
    totals = [0] * len(pieces)
    for name, views in owned.items():
        for view in views:
            for index in wanted[name]:
                piece = pieces[index]
                part = _overlap(view, piece)
                if part is not None:
                    # in the dtype in which the server holds it
                    held = read(name, part.tensor).to(getattr(torch, piece.dtype))
                    totals[index] += slice_digest(held, part.dim, part.start)
    summed = torch.tensor([signed(total) for total in totals], dtype=torch.int64)
    if full.world.size > 1:
        summed = summed.to(full.world.device)
        dist.all_reduce(summed)
    return [as_text(total) for total in summed.tolist()]


def _overlap(view: View, piece: WeightPiece) -> View | None:
    """Return the memory that a view and a piece share; along another dimension both are whole."""
    if view.dim == piece.dim:
        return view.cut(piece.start, piece.length)
    return view
