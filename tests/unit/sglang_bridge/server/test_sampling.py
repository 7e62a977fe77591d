"""Sampling distribution against a slow reference."""

import numpy as np
import pytest
import torch

from sglang_bridge.server.masses import masses_of
from sglang_bridge.server.sampling import Behaviour, behaviour
from tests.support.oracles import behaviour_logp


def logp_of(policy: Behaviour) -> torch.Tensor:
    return masses_of(policy).norm.logp(policy.logits_BV)


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
    found = logp_of(policy).numpy()
    assert (np.isfinite(found) == support).all()
    assert np.abs(found[support] - expected[support]).max() < 1e-5
    assert np.abs(np.exp(found) - np.exp(expected)).max() < 1e-6
    assert policy.is_cut == (top_p < 1)
    if policy.is_cut:
        assert torch.equal(policy.logits_BV.isfinite(), torch.from_numpy(support))
        assert np.abs(policy.logits_BV.numpy()[support] - expected[support]).max() < 1e-5


def test_top_k_and_min_p_cut_as_the_sampler_does():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.06, 0.04]]))
    one = torch.ones(1, 1)
    top_k = behaviour(logits, one, top_k_B=torch.tensor([2]))
    assert torch.allclose(logp_of(top_k).exp(), torch.tensor([[2 / 3, 1 / 3, 0, 0, 0]]))
    min_p = behaviour(logits, one, min_p_B=torch.tensor([0.2]))
    assert logp_of(min_p).isfinite().tolist() == [[True, True, True, False, False]]
    greedy = behaviour(logits, one, top_k_B=torch.tensor([1]))
    assert logp_of(greedy)[0, 0] == 0


def test_the_likeliest_ids_come_first_and_stay_in_the_support():
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 1.0, 2.0]])
    ids, found = behaviour(logits, torch.ones(1, 1)).likeliest(5)
    assert ids[0, :4].tolist() == [1, 4, 3, 0]
    assert found[0].tolist() == [3, 2, 1, 0, -torch.inf]
    cut = behaviour(logits, torch.ones(1, 1), top_k_B=torch.tensor([2]))
    ids, logp = cut.likeliest(3)
    assert ids[0, :2].tolist() == [1, 4]
    assert torch.isclose(logp.exp().sum(), torch.tensor(1.0))
    assert logp[0, 2] == -torch.inf


def test_ids_that_are_gone_come_back_bit_by_bit():
    """Also where what runs in between raises."""
    logits = torch.randn(3, 50)
    before = logits.clone()
    policy = behaviour(logits, torch.ones(3, 1))
    ids, found = policy.likeliest(4)
    gone = torch.arange(4) < torch.tensor([[0], [2], [4]])

    def run_into_an_error() -> None:
        with policy.without(ids, found, gone):
            assert policy.logits_BV.isinf().sum(1).tolist() == [0, 2, 4]
            assert torch.equal(policy.logits_BV.gather(1, ids).isinf(), gone)
            raise KeyError

    with pytest.raises(KeyError):
        run_into_an_error()
    assert torch.equal(logits, before)
