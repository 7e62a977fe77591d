"""Which kernels a machine gets, by what is installed."""

import pytest

from megatron_opd.config import kernels
from megatron_opd.config.kernels import choose_kernels

TE, FUSED, APEX = "transformer_engine", "fused_weight_gradient_mlp_cuda", "amp_C"


@pytest.mark.parametrize("installed", [set(), {TE}, {FUSED, APEX}, {TE, FUSED, APEX}])
@pytest.mark.parametrize("cuda", [False, True])
def test_what_is_chosen_and_why(installed, cuda, monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if name in installed else None)
    chosen = choose_kernels(cuda)
    assert chosen.engine == (cuda and TE in installed)
    assert chosen.fused_gradients == (cuda and bool({TE, FUSED} & installed))
    told = dict(chosen.reasons)
    if not cuda:
        assert "no GPU" in told["layers here"]
        return
    assert ("TransformerEngine: it is installed" in told["layers here"]) == chosen.engine
    assert ("not fused" in told["weight gradients here"]) != chosen.fused_gradients
    if chosen.fused_gradients:
        assert ("TransformerEngine" in told["weight gradients here"]) == chosen.engine
    best = "TransformerEngine" if TE in installed else "apex" if APEX in installed else "torch"
    assert told["optimizer here"].startswith(best)
