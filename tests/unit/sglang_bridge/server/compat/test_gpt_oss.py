"""What gpt-oss needs that SGLang does not do: the server's number format, a rank's own experts."""

import inspect
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from sglang_bridge.server.compat import gpt_oss
from sglang_bridge.server.entry import offer_standins
from sglang_bridge.server.pieces import Piece

offer_standins()


def test_sglang_still_goes_by_config_json_and_loads_every_expert():
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.models import gpt_oss as theirs

    assert "params_dtype=config.dtype" in inspect.getsource(theirs.GptOssDecoderLayer)
    assert "moe_ep_rank" not in inspect.getsource(FusedMoE.weight_loader_fused)
    assert "moe_ep_rank" not in inspect.getsource(theirs.GptOssForCausalLM._load_normal_weights)


def test_the_servers_format_is_named():
    def config(*names: str) -> SimpleNamespace:
        described = SimpleNamespace(architectures=[*names], dtype="as written")
        return SimpleNamespace(hf_config=described, dtype=torch.bfloat16)

    ours, other = config(gpt_oss.MODEL), config("Qwen3ForCausalLM")
    for each in (ours, other):
        gpt_oss.use_dtype(each)
    assert ours.hf_config.dtype == torch.bfloat16
    assert other.hf_config.dtype == "as written"


def test_a_rank_gets_its_own_experts():
    def module(**fields: object) -> torch.nn.Module:
        made = torch.nn.Module()
        made.__dict__.update(fields)
        return made

    model = type(gpt_oss.MODEL, (torch.nn.Module,), {})()
    model.quant_config = None
    model.experts = module(num_local_experts=2, moe_ep_rank=1)
    model.router = torch.nn.Linear(3, 4)
    held = {"experts.gate_up_proj": torch.arange(8.0).view(4, 2), "router.bias": torch.zeros(4)}
    own = dict(gpt_oss.own_experts(model, held.items()))
    assert own["experts.gate_up_proj"].tolist() == [[4, 5], [6, 7]]
    assert own["router.bias"] is held["router.bias"]
    model.quant_config = object()
    assert dict(gpt_oss.own_experts(model, held.items())) == held, "which SGLang cuts itself"


def test_tensors_of_one_expert_are_taken_too(monkeypatch: pytest.MonkeyPatch):
    """A rank's part of its own, which SGLang drops; the others go to SGLang."""
    given: list[str] = []

    class Model(torch.nn.Module):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            given.extend(name for name, _ in weights)

    Model.__name__ = gpt_oss.MODEL
    own, view = "mlp.experts.2.gate_proj.weight", torch.zeros(4, 3)
    monkeypatch.setattr(gpt_oss, "pieces", lambda model: [Piece(own, 0, 2, 2, view[0::2])])
    model = Model()
    gpt_oss.take_single_experts(model)
    whole = torch.arange(12.0).view(4, 3)
    others = ("mlp.router.weight", "mlp.experts.gate_up_proj")
    sent = {own: whole, "mlp.experts.3.gate_proj.weight": whole, **dict.fromkeys(others, whole)}
    model.load_weights(iter(sent.items()))
    assert given == [*others]
    assert torch.equal(view[0::2], whole[2:])
    assert not view[1::2].any()
