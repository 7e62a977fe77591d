"""MiniMax-M2's norms over all heads in torch: of one rank and of two, as transformers' norm."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm

from sglang_bridge.server.compat import qk_norm
from sglang_bridge.server.entry import offer_standins

offer_standins()

EPS = 1e-2


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_of_all_ranks_are_normed_together(ranks: int):
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(5, size, generator=generator) for size in (16, 8)]
    weights = [torch.randn(size, generator=generator) for size in (16, 8)]
    exact = []
    for x, weight in zip(whole, weights, strict=True):
        norm = MiniMaxM2RMSNorm(len(weight), EPS).double()
        norm.weight.data.copy_(weight)
        exact.append(norm(x.double()))
    parts = [[x.chunk(ranks, -1)[rank] for x in whole] for rank in range(ranks)]
    squares = torch.stack([qk_norm.sum_squares(q, k) for q, k in parts]).sum(0)
    for rank, (q, k) in enumerate(parts):
        mine = [weight.chunk(ranks)[rank] for weight in weights]
        found = qk_norm.normalise(q, k, *mine, squares, ranks, EPS)
        for ours, theirs in zip(found, exact, strict=True):
            expected = theirs.chunk(ranks, -1)[rank].float()
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rank", "replicas", "start"), [(0, 1, 0), (3, 1, 24), (3, 2, 8)])
def test_ranks_that_share_a_head_hold_the_same_weights(rank: int, replicas: int, start: int):
    norm = SimpleNamespace(
        attn_tp_rank=rank, num_head_replicas=replicas, weight=torch.ones(8, dtype=torch.float32)
    )
    assert qk_norm.first(norm) == start


def test_every_name_is_sglangs_and_its_own_still_wants_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Else the replacement may go."""
    from sglang.srt.models import minimax_m2

    assert minimax_m2.__name__ == qk_norm.MODEL
    assert inspect.isclass(getattr(minimax_m2, qk_norm.NORM))
    for name, function in qk_norm.replaced().items():
        monkeypatch.setattr(minimax_m2, name, getattr(minimax_m2, name))
        assert "is_cuda" in inspect.getsource(getattr(minimax_m2, name))
        theirs = inspect.signature(getattr(minimax_m2, name)).parameters
        assert len(theirs) == len(inspect.signature(function).parameters)
    qk_norm.answer_in_torch()
    assert minimax_m2.rms_sumsq_serial is qk_norm.sum_squares
    assert minimax_m2.rms_apply_serial is qk_norm.normalise
    monkeypatch.delattr(minimax_m2, "rms_apply_serial")
    with pytest.raises(RuntimeError, match="has no rms_apply_serial, which a CPU needs"):
        qk_norm.answer_in_torch()
