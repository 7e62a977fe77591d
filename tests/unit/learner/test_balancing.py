"""What a filler adds to the balance of experts: nothing."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

from megatron_opd.learner import balancing
from megatron_opd.learner.balancing import Balancing, counted_for_bias, zero_of_no_tokens

OTHERS = {"topk": 2, "num_experts": 4, "moe_aux_loss_coeff": 0.1, "fused": False}


def test_the_loss_of_no_tokens_is_zero_and_so_is_its_gradient():
    logits = torch.randn(3, 4, requires_grad=True)
    # as compute_routing_scores_for_aux_loss masks them
    probs = logits.softmax(-1) * torch.zeros(3, 1)
    none = {"tokens_per_expert": torch.zeros(4), "total_num_tokens": torch.zeros(())}
    loss = zero_of_no_tokens(probs, **none, **OTHERS)
    loss.backward()
    assert float(loss) == 0
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0] * 4] * 3
    assert switch_load_balancing_loss_func(probs, **none, **OTHERS).isnan(), "control"


def test_the_loss_of_tokens_is_megatron_s():
    probs, count = torch.rand(3, 4), torch.tensor([2.0, 1.0, 3.0, 0.0])
    some = {"tokens_per_expert": count, "total_num_tokens": torch.tensor(3.0)}
    assert zero_of_no_tokens(probs, **some, **OTHERS) == switch_load_balancing_loss_func(
        probs, **some, **OTHERS
    )


@pytest.mark.parametrize("positions", [1, 4, 5])
def test_masked_positions_move_no_bias(positions: int):
    """Before: 1 and 4 positions of 4 experts were taken for experts, 5 failed."""
    routed_mE = torch.rand(positions, 4) < 0.5
    mask_m = torch.arange(positions) % 2 == 0
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(4))
    counted_for_bias(router, routed_mE, padding_mask=mask_m)
    assert router.local_tokens_per_expert.tolist() == routed_mE[~mask_m].sum(0).tolist()
    counted_for_bias(router, routed_mE)
    both = routed_mE.sum(0) + routed_mE[~mask_m].sum(0)
    assert router.local_tokens_per_expert.tolist() == both.tolist()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(("aux_loss",), 3.0), (("seq_aux_loss", "aux_loss"), 5.0), (("none",), None)],
)
def test_the_reported_loss_is_of_the_first_kind(
    kinds: tuple[str, ...], expected: float | None, monkeypatch: pytest.MonkeyPatch
):
    """Before: with moe_z_loss_coeff it was the loss of large logits, which routers record first."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(balancing.dist, "all_reduce", lambda total: None)
    tracker, losses = get_moe_metrics_tracker(), {"z_loss": 77.0, "load_balancing_loss": 6.0}
    tracker.clear()
    for name, value in (losses | {"seq_load_balancing_loss": 10.0}).items():
        tracker.record(name, torch.tensor(value), layer_number=1, num_layers=2)
    found = Balancing(None, kinds, (0.1,) * len(kinds), 0.1, moe_layers=2).mean_loss(1)
    assert found == expected
    assert all(not kept.values.any() for kept in tracker.metrics.values())
