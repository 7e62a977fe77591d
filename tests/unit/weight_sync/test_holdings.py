"""Which rows a rank of a server holds, worked out by hand; real servers: tests/e2e.

A server on a CPU pads KV heads and has no copies of them, so those are only here.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import read_model_spec
from megatron_opd.weight_sync.holdings import Held, learner_holdings, server_holdings
from sglang_bridge.weights.formats import dtype_of, item_bytes
from tests.support.models import tiny_glm4_moe, tiny_minimax_m2
from tests.support.published import spec_of

SPEC = replace(spec_of("Qwen3-30B-A3B"), num_layers=1, moe_layers=(True,))
HEAD = SPEC.head_dim


@cache
def holdings(tp: int, ep: int) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = defaultdict(list)
    for held in server_holdings(SPEC, tp, ep):
        found[held.name].append(held)
    return found


def held_by(rank: int, tp: int, ep: int, name: str) -> tuple[int, int, int]:
    """(dimension, start, length)."""
    (found,) = [
        (held.dim, held.start, held.length) for held in holdings(tp, ep)[name] if rank in held.ranks
    ]
    return found


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_ranks_beyond_the_kv_heads_hold_copies_in_turn(tp: int):
    """4 KV heads: of TP 16, ranks 0..3 hold head 0, ranks 4..7 head 1, and so on."""
    assert SPEC.num_kv_heads == 4
    heads = max(1, 4 // tp)
    for rank in range(tp):
        for part in "kv":
            place = held_by(rank, tp, 1, f"model.layers.0.self_attn.{part}_proj.weight")
            assert place == (0, rank * 4 // tp * HEAD, heads * HEAD)
        width = SPEC.num_heads * HEAD // tp
        place = held_by(rank, tp, 1, "model.layers.0.self_attn.q_proj.weight")
        assert place == (0, rank * width, width)


def test_experts_are_split_over_ep_and_each_over_the_ranks_that_are_left():
    """128 experts of TP 8, EP 4: ranks 2 and 3 hold experts 32..63, half of each."""
    half = SPEC.expert_ffn_size // 2
    for expert, rank in ((32, 2), (63, 3), (0, 0), (127, 7)):
        base = f"model.layers.0.mlp.experts.{expert}"
        start = rank % 2 * half
        assert held_by(rank, 8, 4, f"{base}.gate_proj.weight") == (0, start, half)
        assert held_by(rank, 8, 4, f"{base}.down_proj.weight") == (1, start, half)
    with pytest.raises(ValueError, match="unpack"):
        held_by(1, 8, 4, "model.layers.0.mlp.experts.32.up_proj.weight")


def test_the_vocabulary_is_padded_to_64_before_it_is_split():
    spec = replace(SPEC, vocab_size=130)
    places = [
        (held.ranks, held.start, held.length)
        for held in server_holdings(spec, 4, 1)
        if held.name == "model.embed_tokens.weight"
    ]
    assert places == [((0,), 0, 48), ((1,), 48, 48), ((2,), 96, 34)]


def test_ranks_hold_the_norms_of_their_heads(tmp_path: Path):
    """Where a model's norms are split: four ranks share the two key heads."""
    spec = read_model_spec(tiny_minimax_m2(tmp_path / "minimax"))
    found = {
        part: [
            (held.ranks, held.start, held.length)
            for held in server_holdings(spec, 4, 1)
            if held.name == f"model.layers.1.self_attn.{part}_norm.weight"
        ]
        for part in "qk"
    }
    assert found["q"] == [((rank,), 16 * rank, 16) for rank in range(4)]
    assert found["k"] == [((0, 1), 0, 16), ((2, 3), 16, 16)]


def test_what_servers_hold_exactly_is_said(tmp_path: Path):
    """GLM's routers and their biases are float32 in SGLang, whatever the server's dtype."""
    spec = read_model_spec(tiny_glm4_moe(tmp_path / "glm"))
    exact = {
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    }
    for held in (server_holdings(spec, 2, 2), learner_holdings(spec, ParallelConfig(tp=2))):
        assert {part.name for part in held if part.kind == "exact"} == exact
    assert dtype_of("exact", "bfloat16", None) == dtype_of("exact", "bfloat16", "int8") == "float32"
    assert item_bytes("bfloat16")["exact"] == 4
