"""Log-probs of chosen ids."""

import pytest
import torch

from megatron_opd.losses.vocab_parallel import gather_logp

ROWS, VOCAB = 5, 7


def logits(seed: int) -> torch.Tensor:
    return torch.randn(
        ROWS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gather_logp_matches_log_softmax(dtype: torch.dtype):
    whole = logits(11).to(dtype)
    row_N, id_N = torch.tensor([0, 0, 4, 2, 0]), torch.tensor([1, 6, 0, 3, 1])
    ours, reference = whole.clone().requires_grad_(), whole.clone().requires_grad_()
    got = gather_logp(ours, row_N, id_N, temperature=0.5)
    wide = reference.to(got.dtype) / 0.5
    expected = torch.log_softmax(wide, -1)[row_N, id_N]
    weight_N = torch.arange(1.0, 6.0, dtype=got.dtype)
    (got * weight_N).sum().backward()
    (expected * weight_N).sum().backward()
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours.grad, reference.grad)
    assert not ours.grad[1].any(), "a row without ids has no gradient"


def test_gather_logp_passes_gradcheck():
    row_N, id_N = torch.tensor([0, 1, 1, 4]), torch.tensor([2, 2, 5, 6])
    assert torch.autograd.gradcheck(
        lambda x: gather_logp(x, row_N, id_N, temperature=1.3), logits(12).requires_grad_()
    )


def test_extreme_logits_do_not_overflow():
    wild = torch.tensor([[1e4, -1e4, 0.0]])
    got = gather_logp(wild, torch.tensor([0, 0]), torch.tensor([0, 1]))
    torch.testing.assert_close(got, torch.tensor([0.0, -2e4]))
