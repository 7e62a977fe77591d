"""What servers say that they hold is what follows from their layout, or is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.weight_sync.plan import ServerLayout, SyncSettings
from megatron_opd.weight_sync.quantised_pieces import CannotServe
from megatron_opd.weight_sync.shards import (
    common_dtype,
    require_as_planned,
    server_layout,
)
from sglang_bridge.protocol import WeightPiece
from tests.support.config_files import minimal
from tests.support.shards_wire import LAYOUTS, URL, info, pieces_of

REMEDY = "use weight_sync.type: broadcast for servers that are cut otherwise"


@pytest.fixture(scope="module")
def spec(moe: Path) -> ModelSpec:
    return read_model_spec(moe)


def test_what_follows_from_the_layout_is_accepted(spec: ModelSpec):
    for layout in (*LAYOUTS, ServerLayout(4, 2)):  # of TP 4, ranks that hold copies of KV heads
        require_as_planned(URL, spec, layout, pieces_of(spec, layout))


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": 0}, r"should hold \[32:64\] of dimension 0, holds \[0:32\] of dimension 0"),
        ({"length": 16}, r"should hold \[32:64\] of dimension 0, holds \[32:48\] of dimension 0"),
        ({"dim": 1}, r"should hold \[32:64\] of dimension 0, holds \[32:64\] of dimension 1"),
        (None, r"should hold \[32:64\] of dimension 0, holds nothing"),
    ],
)
def test_a_piece_that_is_cut_otherwise_is_named(spec: ModelSpec, change: Any, said: str):
    """By url, rank, tensor and remedy, in one line."""
    layout = LAYOUTS[0]
    others, (mine,) = [], [p for p in pieces_of(spec, layout) if (p.rank, p.hf_name) == (1, QUERY)]
    others = [piece for piece in pieces_of(spec, layout) if piece != mine]
    found = others if change is None else [*others, replace(mine, **change)]
    message = rf"^{URL} \(tp=2, ep=2\) rank 1: {said} of {QUERY}: {REMEDY}$"
    with pytest.raises(CannotServe, match=message):
        require_as_planned(URL, spec, layout, found)


def test_a_tensor_or_a_rank_too_many_is_named(spec: ModelSpec):
    layout = LAYOUTS[0]
    pieces = pieces_of(spec, layout)
    odd = WeightPiece(0, "model.odd.weight", 0, 0, 5, "float32", "")
    with pytest.raises(
        CannotServe, match=r"rank 0: should hold nothing, holds \[0:5\] .* of model"
    ):
        require_as_planned(URL, spec, layout, [*pieces, odd])
    more = [*pieces, *(replace(piece, rank=2) for piece in pieces if piece.rank == 1)]
    with pytest.raises(CannotServe, match=r"rank 2: should hold nothing, holds"):
        require_as_planned(URL, spec, layout, more)
    with pytest.raises(CannotServe, match=r"rank 1: should hold \[.*, holds nothing of"):
        require_as_planned(URL, spec, layout, [piece for piece in pieces if piece.rank == 0])


def test_another_layout_than_the_server_says_is_named(spec: ModelSpec):
    found = pieces_of(spec, ServerLayout(2, 1))
    with pytest.raises(
        CannotServe, match=rf"^{URL} \(tp=2, ep=2\) rank [01]: .*experts.*: {REMEDY}$"
    ):
        require_as_planned(URL, spec, ServerLayout(2, 2), found)


def test_one_dtype_is_everyones():
    def of(*kinds: str) -> list[WeightPiece]:
        return [WeightPiece(0, f"t{i}", 0, 0, 1, kind, "") for i, kind in enumerate(kinds)]

    assert (
        common_dtype({URL: of("bfloat16", "bfloat16"), "http://b:2": of("bfloat16")}) == "bfloat16"
    )
    with pytest.raises(CannotServe, match=r"differ in dtype: .*t1 of http://a:1 is float32"):
        common_dtype({URL: of("bfloat16", "float32")})
    with pytest.raises(CannotServe, match=r"t0 of http://a:1 is float32, t0 of http://b:2 is floa"):
        common_dtype({URL: of("float32"), "http://b:2": of("float16")})
    with pytest.raises(CannotServe, match=r"are float8_e4m3fn, not one of \['bfloat16', 'float16'"):
        common_dtype({URL: of("float8_e4m3fn")})


def test_how_a_server_is_cut_is_what_it_says():
    assert server_layout(info(0, ServerLayout(4, 2))) == ServerLayout(4, 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"bucket_bytes": 10}, SyncSettings("float32", None, 2, 0)),
        ({"bucket_bytes": 10}, SyncSettings("bfloat16", None, 5, 0)),
        # a bucket of scales is no larger either
        ({"bucket_bytes": 10}, SyncSettings("bfloat16", "int8", 2, 0)),
        ({"bucket_bytes": 3}, SyncSettings("float32", None, 1, 0)),
        ({"staging": True}, SyncSettings("float32", None, 2**27, float("inf"))),
        ({"staging": True, "staging_bytes": 10}, SyncSettings("bfloat16", None, 2**28, 10)),
    ],
)
def test_numbers_of_a_bucket_and_bytes_of_a_shadow(settings: Any, expected: SyncSettings):
    found = SyncSettings.of(
        minimal(weight_sync=settings).weight_sync, expected.dtype, expected.format
    )
    assert found == expected
