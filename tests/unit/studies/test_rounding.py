import pytest
import torch

from studies.rounding.weights import add_rounded, movement

ULP = 2.0**-7  # of bfloat16 at 1


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bfloat16)


def test_a_step_below_half_a_unit_is_not_seen_but_kept():
    found = movement([(ones(4), torch.full((4,), 1 + 0.4 * ULP))])
    assert found["standing"] == 1.0
    assert found["moved_main"] == 1.0
    assert found["shown"] == 0.0
    assert found["mean_step"] == pytest.approx(0.4 * ULP, rel=1e-4)  # of float32 numbers at 1


def test_a_step_of_a_whole_unit_is_shown_whole():
    found = movement([(ones(4), torch.full((4,), 1 + ULP))])
    assert found["standing"] == 0.0
    assert found["shown"] == pytest.approx(1.0)
    assert found["cosine"] == pytest.approx(1.0)


def test_shares_are_over_all_tensors_together():
    found = movement([(ones(3), torch.ones(3)), (ones(1), torch.full((1,), 1 + ULP))])
    assert found["standing"] == 0.75
    assert found["moved_main"] == 0.25


def test_weights_of_another_shape_are_compared_one_by_one():
    start = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    assert movement([(start, start.float().view(-1))])["standing"] == 1.0


def test_bfloat16_weights_alone_never_add_up_small_steps():
    alone, main = ones(1), torch.ones(1)
    for _ in range(10):
        add_rounded(alone, torch.tensor([0.4 * ULP]))
        main += 0.4 * ULP
    assert float(alone) == 1.0
    assert float(main.bfloat16()) > 1.0
