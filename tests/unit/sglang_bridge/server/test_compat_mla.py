"""What is mended for multi-head latent attention is still broken, and then works."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_bridge.server import pieces
from sglang_bridge.server.compat import mla
from sglang_bridge.server.entry import offer_standins

offer_standins()

HEADS, KEYS, VALUES, RANK = 3, 4, 2, 5


class Attention(torch.nn.Module):
    """Holds what SGLang's DeepseekV2AttentionMLA has and its loader touches."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_nope_head_dim, self.v_head_dim = KEYS, VALUES
        self.kv_b_proj = torch.nn.Linear(RANK, HEADS * (KEYS + VALUES), bias=False)
        self.w_kc = self.w_vc = None


class Model(torch.nn.Module):
    """Loads as SGLang's models do."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = torch.nn.Module()
        layer.self_attn = Attention()
        self.model: Any = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([layer])
        self.model.start_layer, self.model.end_layer = 0, 1
        self.config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"])
        self.quant_config = None

    def post_load_weights(self) -> None:
        from sglang.srt.models.deepseek_common import deepseek_weight_loader as loader

        loader.DeepseekV2WeightLoaderMixin.post_load_weights(self)  # type: ignore[arg-type]


@torch.no_grad()
def test_copies_that_were_not_made_again_are_seen():
    model = Model()
    model.post_load_weights()
    mla.require_current(model)
    attention: Any = model.model.layers[0].self_attn
    for row in (0, KEYS):  # of the first head: its first key, its first value
        attention.kv_b_proj.weight[row, 0] += 1
        with pytest.raises(mla.StaleCopies, match=r"^model\.layers\.0\.self_attn: .*w_kc, w_vc"):
            mla.require_current(model)
        held = attention.w_kc, attention.w_vc
        model.post_load_weights()
        assert (attention.w_kc, attention.w_vc) == held, "graphs of a GPU hold on to the memory"
        mla.require_current(model)


def test_sglang_makes_the_copies_at_the_end_of_an_update_that_it_did_not_load():
    """What `shards` and `disk` rely on; `broadcast` goes through load_weights, which does so."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    model = Model()
    model.post_load_weights()
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_b_proj.weight.mul_(2)
    updater: Any = SimpleNamespace(get_model=lambda: model, device="cpu")
    WeightUpdater.end_weight_update(updater, run_post_load=True)
    mla.require_current(model)


def test_a_rank_holds_its_heads_of_a_latent_and_all_of_what_makes_it():
    from sglang.srt.layers import linear

    def made(kind: Any, **fields: Any) -> Any:
        module = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        module.__dict__.update(fields)
        return module

    attention = SimpleNamespace(q_lora_rank=3, kv_lora_rank=RANK, qk_rope_head_dim=2)
    group = SimpleNamespace(rank_in_group=1, world_size=2)
    owner = "model.layers.0.self_attn"
    modules: Any = {
        owner: attention,
        f"{owner}.kv_b_proj": made(linear.ColumnParallelLinear, tp_group=group),
        f"{owner}.fused_qkv_a_proj_with_mqa": made(linear.ReplicatedLinear),
    }
    (heads,) = pieces.pieces_of(modules, f"{owner}.kv_b_proj", "weight", torch.zeros(6, RANK))
    assert (heads.hf_name, heads.dim, heads.start, heads.length) == (
        f"{owner}.kv_b_proj.weight",
        0,
        6,
        6,
    )
    rows = torch.arange(40.0).view(10, 4)
    fused = f"{owner}.fused_qkv_a_proj_with_mqa"
    queries, keys = pieces.pieces_of(modules, fused, "weight", rows)
    assert [piece.hf_name for piece in (queries, keys)] == [
        f"{owner}.q_a_proj.weight",
        f"{owner}.kv_a_proj_with_mqa.weight",
    ]
    assert torch.equal(torch.cat([queries.view, keys.view]), rows)
    assert [(p.start, p.length) for p in (queries, keys)] == [(0, 3), (0, 7)]


def test_sglang_has_no_plain_rotary_positions_on_a_cpu():
    from sglang.srt.layers.rotary_embedding import factory

    sizes = 8, 8, 64, 10000.0
    with pytest.raises(AssertionError):
        factory.get_rope_cpu(*sizes)  # type: ignore[arg-type]
    made = mla.around_rope(factory.get_rope_cpu, *sizes, False)
    assert type(made) is factory.RotaryEmbedding
    assert made.is_neox_style is False
    other = {"rope_type": "llama3"}
    with pytest.raises(AssertionError, match="deepseek_yarn"):
        mla.around_rope(factory.get_rope_cpu, *sizes, False, other)


def test_sglang_takes_torchs_attention_for_tritons(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    registry = handlers.AttentionBackendRegistry
    monkeypatch.setattr(registry, "_handlers", dict(registry._handlers))
    assert registry.get_handler(mla.BACKEND) is handlers.handle_attention_triton
    mla.always_absorb()
    assert registry.get_handler(mla.BACKEND) is handlers._dispatch_mla_subtype
