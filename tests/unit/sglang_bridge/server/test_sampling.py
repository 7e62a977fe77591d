"""Sampling distribution and inverse-CDF draw against slow references."""

import numpy as np
import pytest
import torch

from sglang_bridge.server.sampling import BLOCK, FLAT_VOCAB, behaviour, draw
from tests.support.oracles import behaviour_logp, chi_square_per_df


def uniform(rows: int, draws: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, draws, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.3, 0.8), (0.6, 0.3)])
def test_behaviour_is_tempered_cut_and_renormalised(temperature: float, top_p: float):
    logits = 3 * torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    policy = behaviour(
        logits,
        torch.full((7, 1), temperature),
        top_p_B=torch.full((7,), top_p) if top_p < 1 else None,
    )
    assert torch.equal(logits, before), "the sampler still needs these logits"
    expected = np.stack(
        [behaviour_logp(row.double().numpy(), temperature, top_p) for row in logits]
    )
    support = np.isfinite(expected)
    assert ((policy.probs_BV > 0).numpy() == support).all()
    everything = policy.gather(torch.arange(300).expand(7, -1)).numpy()
    assert np.abs(everything - expected)[support].max() < 1e-5
    normalised = policy.probs_BV / policy.probs_BV.sum(-1, keepdim=True)
    assert np.abs(normalised.numpy() - np.exp(expected)).max() < 1e-6


def test_top_k_and_min_p_cut_as_the_sampler_does():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.06, 0.04]]))
    one = torch.ones(1, 1)
    top_k = behaviour(logits, one, top_k_B=torch.tensor([2]))
    assert top_k.probs_BV.gt(0).tolist() == [[True, True, False, False, False]]
    assert torch.allclose(
        top_k.gather(torch.tensor([[0, 1]])).exp(), torch.tensor([[2 / 3, 1 / 3]])
    )
    min_p = behaviour(logits, one, min_p_B=torch.tensor([0.2]))
    assert min_p.probs_BV.gt(0).tolist() == [[True, True, True, False, False]]
    greedy = behaviour(logits, one, top_k_B=torch.tensor([1]))
    assert greedy.gather(torch.tensor([[0]])).tolist() == [[0.0]]


@pytest.mark.parametrize("vocab", [5, BLOCK, 1000, FLAT_VOCAB, FLAT_VOCAB + 1])
def test_draws_follow_the_probabilities(vocab: int):
    probs = torch.softmax(2 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(3)), -1)
    ids, total = draw(probs, uniform(3, 40_000))
    assert torch.allclose(total, torch.ones(3, 1, dtype=torch.float64), atol=1e-6)
    for row in range(3):
        counts = np.bincount(ids[row].numpy(), minlength=vocab)
        exact = probs[row].double().numpy()
        ratio, df = chi_square_per_df(counts, exact / exact.sum())
        assert abs(ratio - 1) < 6 * (2 / df) ** 0.5, (row, ratio, df)


def test_every_id_of_a_large_vocabulary_can_be_drawn():
    """In a float32 cumulative sum the ids after the spike would all share one edge."""
    vocab = 152_064
    probs = torch.full((1, vocab), 1e-9)
    probs[0, 7] = 1.0
    wide = probs.double()
    middles = (wide.cumsum(-1) - wide / 2) / wide.sum()
    chosen = torch.arange(8, vocab, 997)
    assert draw(probs, middles[:, chosen])[0].tolist() == [chosen.tolist()]


@pytest.mark.parametrize("vocab", [3 * BLOCK, FLAT_VOCAB + BLOCK])
def test_zero_probability_is_never_drawn(vocab: int):
    probs = torch.zeros(2, vocab)
    probs[0, [3, BLOCK + 9, 2 * BLOCK - 1]] = torch.tensor([0.2, 1e-30, 0.8])
    probs[1, BLOCK] = 1.0
    edges = torch.tensor([0.0, 1e-300, 0.2, 0.5, 1 - 2**-53], dtype=torch.float64)
    corners = torch.cat([uniform(2, 5000), edges.expand(2, -1)], dim=1)
    ids, _ = draw(probs, corners)
    assert (probs.gather(1, ids) > 0).all()
    assert (ids[1] == BLOCK).all()
    assert ids[0, 5000] == 3, "a target of 0 belongs to the first id that has mass"


def test_the_likeliest_ids_come_first_and_stay_in_the_support():
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 1.0, 2.0]])
    ids, logp = behaviour(logits, torch.ones(1, 1)).likeliest(5)
    assert ids[0, :4].tolist() == [1, 4, 3, 0]
    assert logp[0, 4] == -torch.inf
    cut = behaviour(logits, torch.ones(1, 1), top_k_B=torch.tensor([2]))
    ids, logp = cut.likeliest(3)
    assert ids[0, :2].tolist() == [1, 4]
    assert torch.isclose(logp.exp().sum(), torch.tensor(1.0))
    assert logp[0, 2] == -torch.inf
