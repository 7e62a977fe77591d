"""Reductions: sums and one count, so that micro-batches and ranks add up."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.losses.cache import Cache
from megatron_opd.losses.objective import evaluate
from tests.support.loss_cases import (
    SUPPORTS,
    Problem,
    cache_of,
    draw_rows,
    estimator,
    problem,
    student_logp,
    ungrouped_cache,
)

KINDS = [{"type": "token_mean"}, {"type": "sequence_mean"}, {"type": "fixed_length", "length": 7}]
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def loss_of(est, case: Problem, rows) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
    result = evaluate(est, cache_of(est, case, rows, student_logp(case.student_TV, rows)))
    return result.loss_sum, result.count, result.sums


def part_of(case: Problem, rows, first: int, last: int):
    """Responses [first, last) alone."""
    at = slice(sum(case.lengths[:first]), sum(case.lengths[:last]))
    tensors = {name: getattr(case, name)[at] for name in ("student_TV", "prox_TV", "sampler_TV")}
    tensors |= {"teacher_TV": case.teacher_TV[at], "path": case.path[at]}
    tensors |= {"lengths": case.lengths[first:last], "rewards": case.rewards[first:last]}
    return Problem(**(vars(case) | tensors)), rows[at]


@settings(deadline=None)
@given(sizes=lengths, cut=st.integers(0, 5), kind=st.sampled_from(KINDS))
def test_parts_add_up_to_the_whole(sizes: list[int], cut: int, kind: dict):
    est = estimator(support={"type": "mc", "m": 3}, reduction=kind)
    case = problem(1, lengths=tuple(sizes))
    rows = draw_rows(est.support, case, np.random.default_rng(0))
    loss, count, sums = loss_of(est, case, rows)
    cut = min(cut, len(sizes))
    parts = [loss_of(est, *part_of(case, rows, *ends)) for ends in ((0, cut), (cut, len(sizes)))]
    assert count == sum(part[1] for part in parts)
    assert float(loss) == pytest.approx(sum(float(part[0]) for part in parts), abs=1e-12)
    for name, value in sums.items():
        assert float(value) == pytest.approx(
            sum(float(part[2][name]) for part in parts), abs=1e-12
        ), name


def of_losses_1(responses: list[int], **columns: torch.Tensor) -> Cache:
    """A path cache of three responses, each token's loss 1. responses: of the tokens."""
    one_T, at_T = torch.ones(len(responses), dtype=torch.float64), torch.arange(len(responses))
    return ungrouped_cache(
        student_logp_N=(-one_T).requires_grad_(),
        sampler_logp_N=-one_T,
        teacher_logp_N=-2 * one_T,
        weight_N=one_T,
        row_N=at_T,
        path_T=at_T,
        sample_T=torch.tensor(responses),
        num_samples=3,
        **columns,
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["type"])
def test_what_a_token_weighs(kind: dict):
    """Responses of 1 and 4 tokens (and one of none), each token's loss 1."""
    cache = of_losses_1([0, 2, 2, 2, 2])
    result = evaluate(estimator(support={"type": "path"}, reduction=kind), cache)
    (result.loss_sum / result.count).backward()
    expected = {
        "token_mean": [1 / 5] * 5,
        "sequence_mean": [1 / 3] + [1 / 12] * 4,
        "fixed_length": [1 / 21] * 5,
    }
    assert cache.student_logp_N.grad is not None
    assert cache.student_logp_N.grad.tolist() == pytest.approx(expected[kind["type"]])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["type"])
def test_what_a_token_of_several_sequences_weighs(kind: dict):
    """A sample of two sequences, of 1 and 3 tokens, and one of 2 tokens; each token's loss 1."""
    shares = torch.tensor([0.25, 0.75, 1.0], dtype=torch.float64)
    cache = of_losses_1([0, 1, 1, 1, 2, 2], share_B=shares)
    result = evaluate(estimator(support={"type": "path"}, reduction=kind), cache)
    (result.loss_sum / result.count).backward()
    expected = {
        "token_mean": [1 / 6] * 6,
        "sequence_mean": [1 / 8] * 4 + [1 / 4] * 2,
        "fixed_length": [1 / 14] * 6,
    }
    assert cache.student_logp_N.grad is not None
    assert cache.student_logp_N.grad.tolist() == pytest.approx(expected[kind["type"]])


@pytest.mark.parametrize("support", SUPPORTS, ids=lambda support: support["type"])
def test_a_batch_of_no_tokens_is_zero(support: dict):
    for kind, sizes in itertools.product(KINDS, [(0,), (0, 0), ()]):
        objective = "forward_kl" if support["type"].startswith("teacher") else "reverse_kl"
        est = estimator(support=support, objective={"type": objective}, reduction=kind)
        case = problem(1, lengths=sizes)
        student_N = torch.zeros(0, dtype=torch.float64, requires_grad=True)
        result = evaluate(est, cache_of(est, case, [], student_N))
        result.loss_sum.backward()
        assert float(result.loss_sum.detach()) == 0
        assert result.count == (0 if kind["type"] == "token_mean" else len(sizes))


@settings(deadline=None)
@given(
    draws=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4),
    support=st.sampled_from(["mc", "teacher_mc"]),
)
def test_dedup_with_weights_is_the_expanded_form(draws: list[list[int]], support: str):
    """count / m on one id equals m entries of 1 / m, to 1e-12: value and gradient; all-equal ids,
    one draw and the edge ids 0 and V - 1 are among them."""
    objective = "reverse_kl" if support == "mc" else "forward_kl"
    est = estimator(support={"type": support}, objective={"type": objective})
    case = problem(2, lengths=(len(draws),))
    merged = [
        {case.path[t]: 0.0} | {a: row.count(a) / len(row) for a in row}
        for t, row in enumerate(draws)
    ]
    logits = case.student_TV.clone().requires_grad_()
    loss = evaluate(est, cache_of(est, case, merged, student_logp(logits, merged))).loss_sum
    (gradient,) = torch.autograd.grad(loss, logits)

    own = case.student_TV.clone().requires_grad_()
    row_N = torch.tensor([t for t, row in enumerate(draws) for _ in row])
    id_N = torch.tensor([a for row in draws for a in row])
    expanded = ungrouped_cache(
        student_logp_N=torch.log_softmax(own, -1)[row_N, id_N],
        sampler_logp_N=case.sampler_TV[row_N, id_N],
        teacher_logp_N=case.teacher_TV[row_N, id_N],
        weight_N=torch.tensor([1 / len(row) for row in draws for _ in row], dtype=torch.float64),
        row_N=row_N,
        path_T=torch.tensor(np.cumsum([0, *map(len, draws)])[:-1]),
        sample_T=torch.zeros(len(draws), dtype=torch.int64),
        num_samples=1,
    )
    whole = evaluate(est, expanded).loss_sum
    (expected,) = torch.autograd.grad(whole, own)
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_one_draw_is_the_path_form():
    """mc with m = 1 and a draw that is the path token: the single-sample estimator."""
    case = problem(3)
    single = estimator(support={"type": "path"})
    one = estimator(support={"type": "mc", "m": 1})
    rows = [{a: 1.0} for a in case.path]
    assert float(loss_of(one, case, rows)[0]) == float(loss_of(single, case, rows)[0])


def test_a_path_token_without_weight_counts_nothing_whatever_its_scores():
    """0 * inf would be nan: pairs of weight 0 leave before any arithmetic."""
    est = estimator(support={"type": "mc", "m": 3})
    case = problem(4, vocab=12)
    rows = draw_rows(est.support, case, np.random.default_rng(1))
    unhit = [t for t, a in enumerate(case.path) if rows[t][a] == 0]
    assert unhit, "the case must have a path token that no draw hit"
    expected = float(loss_of(est, case, rows)[0])
    for score in (-np.inf, np.nan, 0.0):
        scores = case.teacher_TV.clone()
        for t in unhit:
            scores[t, case.path[t]] = score
        got = loss_of(est, Problem(**(vars(case) | {"teacher_TV": scores})), rows)
        assert float(got[0]) == expected
        assert float(got[2]["excluded_ids"]) == 0
