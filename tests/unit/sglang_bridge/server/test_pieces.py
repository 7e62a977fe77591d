"""A server's stacked experts under the names that checkpoints have, so that digests compare."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_opd.models.families.family import Family
from megatron_opd.models.families.keys import Key, hf_names
from megatron_opd.models.families.table import FAMILIES
from sglang_bridge.server import pieces

OWNER = {
    "deepseek_v2": "model.layers.3.mlp.experts",
    "deepseek_v3": "model.layers.3.mlp.experts",
    "gpt_oss": "model.layers.3.mlp.experts",
    "glm4_moe": "model.layers.3.mlp.experts",
    "glm4_moe_lite": "model.layers.3.mlp.experts",
    "qwen2_moe": "model.layers.3.mlp.experts",
    "qwen3_5_moe_text": "model.layers.3.mlp.experts",
    "qwen3_moe": "model.layers.3.mlp.experts",
    "minimax_m2": "model.layers.3.block_sparse_moe.experts",
    "mixtral": "model.layers.3.block_sparse_moe.experts",
}


def expert_names(family: Family, expert: int) -> list[str]:
    """Gate, up and down of an expert of layer 3, by the learner's table; without biases."""
    matrices = [row.expert and row.hf[0].endswith(".weight") for row in family.layer]
    rows = [i for i, matrix in enumerate(matrices) if matrix]
    return [name for row in rows for name in hf_names(family, Key(3, row, expert))]


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.moe], ids=lambda f: f.name)
def test_pieces_of_experts_have_published_names(family: Family):
    owner = OWNER[family.name]
    module = SimpleNamespace(num_fused_shared_experts=0, moe_ep_rank=1, moe_tp_rank=1)
    w13, w2 = torch.arange(64.0).view(2, 8, 4), torch.arange(32.0).view(2, 4, 4)
    found = [
        *pieces._experts(module, owner, "w13_weight", w13),
        *pieces._experts(module, owner, "w2_weight", w2),
    ]
    expected = {name for expert in (2, 3) for name in expert_names(family, expert)}
    assert {piece.hf_name for piece in found} == expected
    gate, up, down = expert_names(family, 3)
    by_name = {piece.hf_name: piece for piece in found}
    assert torch.equal(by_name[gate].view, w13[1, :4])
    assert torch.equal(by_name[up].view, w13[1, 4:])
    assert torch.equal(by_name[down].view, w2[1])
    places = {n: (by_name[n].dim, by_name[n].start, by_name[n].length) for n in (gate, up, down)}
    assert places == {gate: (0, 4, 4), up: (0, 4, 4), down: (1, 4, 4)}


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.moe], ids=lambda f: f.name)
def test_scales_of_experts_are_cut_as_their_rows_are(family: Family):
    """Gate's and up's over the ranks; down's not, of which each rank holds columns of all rows."""
    owner = OWNER[family.name]
    module = SimpleNamespace(num_fused_shared_experts=0, moe_ep_rank=1, moe_tp_rank=1)
    w13, w2 = torch.arange(16.0).view(2, 8, 1), torch.arange(8.0).view(2, 4, 1)
    found = [
        *pieces._experts(module, owner, "w13_weight_scale", w13),
        *pieces._experts(module, owner, "w2_weight_scale", w2),
    ]
    by_name = {piece.hf_name.removesuffix("_scale"): piece for piece in found}
    gate, up, down = expert_names(family, 3)
    assert torch.equal(by_name[gate].view, w13[1, :4])
    assert torch.equal(by_name[up].view, w13[1, 4:])
    assert torch.equal(by_name[down].view, w2[1])
    places = {n: (by_name[n].dim, by_name[n].start, by_name[n].length) for n in (gate, up, down)}
    assert places == {gate: (0, 4, 4), up: (0, 4, 4), down: (0, 0, 4)}


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_with_biases_are_taken_apart_row_by_row(rank: int):
    """Gate and up take turns there; of two ranks one adds the bias of down."""
    owner = "model.layers.3.mlp.experts"
    shapes = {"w13_weight": (2, 8, 3), "w13_weight_bias": (2, 8), "w2_weight_bias": (2, 5)}
    held = {leaf: torch.randn(shape) for leaf, shape in shapes.items()}
    module = SimpleNamespace(num_fused_shared_experts=0, moe_ep_rank=1, moe_tp_rank=rank, **held)
    found = {
        piece.hf_name.removeprefix(f"{owner}."): piece
        for leaf, data in held.items()
        for piece in pieces._experts(module, owner, leaf, data)
    }
    for leaf, kind in (("w13_weight", "weight"), ("w13_weight_bias", "bias")):
        for first, part in enumerate(("gate", "up")):
            piece = found[f"3.{part}_proj.{kind}"]
            assert torch.equal(piece.view, held[leaf][1, first::2])
            assert (piece.dim, piece.start, piece.length) == (0, 4 * rank, 4)
            piece.view.fill_(7)
            assert (held[leaf][1, first::2] == 7).all(), "live memory"
    assert ("3.down_proj.bias" in found) == (rank == 0)
    if rank == 0:
        assert torch.equal(found["3.down_proj.bias"].view, held["w2_weight_bias"][1])


LAYERS = "sglang.srt.layers"  # importing them takes seconds, and files of a server's own


@pytest.fixture
def embedding(monkeypatch: pytest.MonkeyPatch) -> type:
    """The class that SGLang's vocabulary layers have here."""
    kinds = ("QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear")
    kinds += ("ColumnParallelLinear",)
    linear = SimpleNamespace(**{kind: type(kind, (), {}) for kind in kinds})
    vocabulary = SimpleNamespace(VocabParallelEmbedding=type("VocabParallelEmbedding", (), {}))
    experts = SimpleNamespace(FusedMoE=type("FusedMoE", (), {}))
    for name, module in {
        LAYERS: SimpleNamespace(linear=linear),
        f"{LAYERS}.vocab_parallel_embedding": vocabulary,
        f"{LAYERS}.moe.fused_moe_triton.layer": experts,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return vocabulary.VocabParallelEmbedding


def test_sinks_are_those_of_a_ranks_heads(embedding: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pieces, "_rank", lambda group: group)
    modules = {"model.layers.0.self_attn": SimpleNamespace(qkv_proj=SimpleNamespace(tp_group=2))}
    owner = "model.layers.0.self_attn"
    (piece,) = pieces.pieces_of(modules, owner, "sinks", torch.zeros(3))  # type: ignore[arg-type]
    assert (piece.hf_name, piece.dim, piece.start, piece.length) == (f"{owner}.sinks", 0, 6, 3)


@pytest.mark.parametrize(("rank", "held"), [(0, [(0, 3)]), (1, [(3, 2)]), (2, [])])
def test_a_rank_of_padding_alone_holds_no_piece(
    embedding: type, rank: int, held: list[tuple[int, int]]
):
    """Five ids over three ranks of three. Before: a piece of no rows, which no plan has."""
    module = embedding()
    count = max(0, min(3, 5 - 3 * rank))
    module.shard_indices = SimpleNamespace(
        num_added_elements=0, num_org_elements=count, org_vocab_start_index=min(5, 3 * rank)
    )
    modules = {"model.embed_tokens": module}
    found = list(pieces.pieces_of(modules, "model.embed_tokens", "weight", torch.zeros(3, 4)))
    assert [(piece.start, piece.length) for piece in found] == held
    assert all(piece.view.shape == (piece.length, 4) for piece in found)


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [
        ("use_triton_kernels", "start the server with --moe-runner-backend triton"),
        ("use_flashinfer_trtllm_moe", "start the server with --moe-runner-backend triton"),
        ("w13_swiglu_interleaved", "unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"),
    ],
)
def test_experts_that_are_laid_out_for_other_kernels_are_refused(layout: str, remedy: str):
    """Whose rows would be compared, and written, as if they were gate and up."""
    experts = SimpleNamespace(
        num_fused_shared_experts=0,
        moe_ep_rank=0,
        moe_tp_rank=0,
        quant_method=SimpleNamespace(**{layout: True}),
    )
    data = torch.zeros(2, 8, 4)
    with pytest.raises(TypeError, match=f"^mlp.experts: weight syncs cannot .*, {remedy}$"):
        list(pieces._experts(experts, "mlp.experts", "w13_weight", data))
    experts.quant_method = SimpleNamespace(**{layout: False})
    assert len(list(pieces._experts(experts, "mlp.experts", "w13_weight", data))) == 4
