"""Checks that servers hold their matrices as `student.quantization` says. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.holdings import as_held, server_holdings
from sglang_bridge.protocol import WeightPiece
from sglang_bridge.weights.formats import HELD_AS, PLAIN, SCALE_DTYPE, Format, Kind, dtype_of

REMEDY = "start it with `opd serve` and this configuration"


class CannotServe(ValueError):
    """Reports a server whose weights are not cut, or not held, as a transport knows."""


def plain_pieces(
    spec: ModelSpec, format: Format | None, pieces: Mapping[str, Sequence[WeightPiece]]
) -> dict[str, list[WeightPiece]]:
    """Return the pieces that are not quantised, by server.

    CannotServe: a matrix is held otherwise than in `format`, or quantised although there is none.
    """
    kinds: dict[str, Kind] = {
        held.name: held.kind for held in as_held(server_holdings(spec, 1, 1), format)
    }
    plain: dict[str, list[WeightPiece]] = {}
    for url, found in pieces.items():
        plain[url] = []
        for piece in found:
            kind = kinds.get(piece.hf_name, PLAIN)
            if kind != PLAIN:
                _require(url, piece, dtype_of(kind, SCALE_DTYPE, format), format)
                continue
            if piece.dtype in HELD_AS.values():
                _require(url, piece, "what the checkpoint holds", format)
            plain[url].append(piece)
    return plain


def _require(url: str, piece: WeightPiece, wanted: str, format: Format | None) -> None:
    if piece.dtype != wanted:
        raise CannotServe(
            f"{url} must hold {piece.hf_name} as {wanted}, as student.quantization is "
            f"{format or 'null'}, got {piece.dtype}; {REMEDY}"
        )
