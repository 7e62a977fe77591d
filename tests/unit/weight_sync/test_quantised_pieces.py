"""Servers that hold their matrices otherwise than the configuration says are named."""

from dataclasses import replace

import pytest

from megatron_opd.weight_sync.holdings import as_held, server_holdings
from megatron_opd.weight_sync.quantised_pieces import CannotServe, plain_pieces
from sglang_bridge.protocol import WeightPiece
from sglang_bridge.weights.formats import Format, dtype_of
from tests.support.published import spec_of

SPEC = replace(spec_of("Qwen3-1.7B"), num_layers=1)
URL, NAME = "http://a:1", "model.layers.0.mlp.down_proj.weight"


def pieces_of(format: Format | None) -> list[WeightPiece]:
    return [
        WeightPiece(0, h.name, h.dim, h.start, h.length, dtype_of(h.kind, "bfloat16", format), "")
        for h in as_held(server_holdings(SPEC, 1, 1), format)
    ]


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_what_is_not_quantised_is_left(format: Format):
    found = plain_pieces(SPEC, format, {URL: pieces_of(format)})[URL]
    assert {piece.dtype for piece in found} == {"bfloat16"}
    assert {piece.hf_name.rpartition("proj")[1] for piece in found} == {""}
    assert plain_pieces(SPEC, None, {URL: pieces_of(None)}) == {URL: pieces_of(None)}


@pytest.mark.parametrize(
    ("format", "held", "message"),
    [
        ("int8", None, "as int8, as student.quantization is int8, got bfloat16"),
        ("fp8", "int8", "as float8_e4m3fn, as student.quantization is fp8, got int8"),
        (None, "fp8", "as what the checkpoint holds, as student.quantization is null, got float8"),
    ],
)
def test_another_format_is_named(format: Format | None, held: Format | None, message: str):
    with pytest.raises(CannotServe, match=rf"^{URL} must hold model\.layers\.0\..*{message}"):
        plain_pieces(SPEC, format, {URL: pieces_of(held)})


def test_scales_of_another_dtype_are_named():
    pieces = [
        replace(piece, dtype="bfloat16") if piece.hf_name == f"{NAME}_scale" else piece
        for piece in pieces_of("int8")
    ]
    with pytest.raises(CannotServe, match=r"down_proj\.weight_scale as float32, .*got bfloat16"):
        plain_pieces(SPEC, "int8", {URL: pieces})
