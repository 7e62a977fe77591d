"""The objective against exact sums over a small vocabulary, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.losses.objective import reverse_kl
from megatron_opd.losses.ratios import NUM_BINS, ratio_histogram, ratio_quantile
from megatron_opd.losses.vocab_parallel import gather_logp

ROWS, VOCAB = 5, 7


def logits(seed: int) -> torch.Tensor:
    return torch.randn(
        ROWS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def full_support(student_TV: torch.Tensor, old_TV: torch.Tensor, teacher_TV: torch.Tensor):
    """The exact cache: every id of every row with weight p_old."""
    row_N = torch.arange(ROWS).repeat_interleave(VOCAB)
    id_N = torch.arange(VOCAB).repeat(ROWS)
    student_N = gather_logp(student_TV, row_N, id_N)
    sampler_N = torch.log_softmax(old_TV, -1).flatten()
    teacher_N = torch.log_softmax(teacher_TV, -1).flatten()
    return student_N, sampler_N, teacher_N, sampler_N.exp()


def test_on_the_exact_cache_the_surrogate_is_the_kl_and_has_its_gradient():
    student_TV = logits(0).requires_grad_()
    exact_TV = student_TV.detach().clone().requires_grad_()
    result = reverse_kl(*full_support(student_TV, logits(1), logits(2)))
    result.loss_sum.backward()
    p, q = torch.log_softmax(exact_TV, -1), torch.log_softmax(logits(2), -1)
    kl = (p.exp() * (p - q)).sum()
    kl.backward()
    assert float(result.loss_sum) == pytest.approx(float(kl), rel=1e-12)
    assert float(result.reverse_kl_sum) == pytest.approx(float(kl), rel=1e-12)
    torch.testing.assert_close(student_TV.grad, exact_TV.grad, rtol=1e-10, atol=1e-12)


def test_monte_carlo_caches_are_unbiased_for_the_stale_student():
    student, old, teacher = logits(3), logits(4), logits(5)
    p, q = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    kl = float((p.exp() * (p - q)).sum())
    student_N, sampler_N, teacher_N, prob_N = full_support(student, old, teacher)
    rng, m, repeats = np.random.default_rng(0), 16, 4000
    estimates = []
    for _ in range(repeats):
        counts = np.stack(
            [rng.multinomial(m, row / row.sum()) for row in prob_N.view(ROWS, VOCAB).numpy()]
        )
        weight_N = torch.tensor(counts.flatten() / m)
        estimates.append(float(reverse_kl(student_N, sampler_N, teacher_N, weight_N).loss_sum))
    error = np.std(estimates) / math.sqrt(repeats)
    assert abs(np.mean(estimates) - kl) < 4 * error
    assert 4 * error < 0.1 * kl, "the check must be able to fail"


def test_student_equal_to_teacher_is_exactly_nothing():
    student_TV = logits(6).requires_grad_()
    student_N, sampler_N, _, weight_N = full_support(student_TV, logits(7), logits(6))
    result = reverse_kl(student_N, sampler_N, student_N.detach(), weight_N)
    result.loss_sum.backward()
    assert float(result.loss_sum) == 0
    assert float(result.reverse_kl_sum) == 0
    assert not student_TV.grad.any()


def test_one_row_off_is_noticed():
    student_N, _, _, _ = full_support(logits(6), logits(6), logits(6))
    shifted_N = student_N.view(ROWS, VOCAB).roll(1, 0).flatten()
    result = reverse_kl(student_N, student_N, shifted_N, student_N.exp())
    assert float(result.reverse_kl_sum) > 0.1


@pytest.mark.parametrize("score", [-math.inf, math.nan, 0.0])
def test_an_id_that_no_draw_hit_counts_exactly_nothing(score: float):
    student_TV = logits(8).requires_grad_()
    student_N, sampler_N, teacher_N, weight_N = full_support(student_TV, logits(9), logits(10))
    weight_N[3] = 0
    kept = torch.arange(len(weight_N)) != 3
    reference = reverse_kl(student_N[kept], sampler_N[kept], teacher_N[kept], weight_N[kept])
    (expected,) = torch.autograd.grad(reference.loss_sum, student_TV, retain_graph=True)
    teacher_N[3] = score
    result = reverse_kl(student_N, sampler_N, teacher_N, weight_N)
    result.loss_sum.backward()
    assert float(result.loss_sum) == float(reference.loss_sum)
    torch.testing.assert_close(student_TV.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("max_ratio", [0.5, 1.0, 2.0])
def test_truncation_caps_the_coefficient_of_the_gradient(max_ratio: float):
    student_N = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    sampler_N = torch.tensor([-2.0, -1.0, -200.0], dtype=torch.float64)
    teacher_N = torch.tensor([-0.5, -3.0, -1.0], dtype=torch.float64)
    weight_N = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    result = reverse_kl(student_N, sampler_N, teacher_N, weight_N, max_ratio=max_ratio)
    result.loss_sum.backward()
    ratio = (student_N - sampler_N).exp().detach()
    coefficient = ratio.clamp(max=max_ratio)
    expected = -weight_N * coefficient * (teacher_N - student_N.detach())
    torch.testing.assert_close(student_N.grad, expected)
    assert float(result.loss_sum) == pytest.approx(float(expected.sum()))
    assert float(result.truncated_weight) == float(weight_N[ratio > max_ratio].sum())


def test_a_vanishing_ratio_stays_finite_under_truncation():
    student_N = torch.tensor([-2000.0], requires_grad=True)
    zero, one = torch.zeros(1), torch.ones(1)
    result = reverse_kl(student_N, zero, zero, one, max_ratio=2.0)
    result.loss_sum.backward()
    assert math.isfinite(float(result.loss_sum))
    assert torch.isfinite(student_N.grad).all()


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


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=50),
    st.floats(0.01, 0.99),
)
def test_histogram_quantile_is_the_weighted_quantile(values: list[float], quantile: float):
    log_ratio_N = torch.tensor(values, dtype=torch.float64)
    weight_N = torch.linspace(0.5, 1.5, len(values), dtype=torch.float64)
    histogram = ratio_histogram(log_ratio_N, weight_N)
    assert histogram.shape == (NUM_BINS,)
    assert float(histogram.sum()) == pytest.approx(float(weight_N.sum()))
    found = math.log(ratio_quantile(histogram, quantile))
    ordered, order = log_ratio_N.sort()
    reached = weight_N[order].cumsum(0) / weight_N.sum()
    # Any neighbour within float error of the cut is a right answer.
    low = ordered[min(int((reached < quantile - 1e-9).sum()), len(values) - 1)]
    high = ordered[min(int((reached < quantile + 1e-9).sum()), len(values) - 1)]
    slack = 0.02 * max(abs(float(low)), abs(float(high))) + 2e-8
    assert float(low) - slack <= found <= float(high) + slack


def test_histograms_add_up_and_empty_means_one():
    values = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one = torch.ones(100, dtype=torch.float64)
    parts = ratio_histogram(values[:30], one[:30]) + ratio_histogram(values[30:], one[30:])
    torch.testing.assert_close(parts, ratio_histogram(values, one))
    assert ratio_quantile(torch.zeros(NUM_BINS, dtype=torch.float64), 0.5) == 1.0
