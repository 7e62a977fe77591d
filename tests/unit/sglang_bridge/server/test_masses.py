"""Masses of blocks and the log-probs they give, against float64."""

import numpy as np
import pytest
import torch

from benchmarks.passes import Passes
from sglang_bridge.server import masses
from sglang_bridge.server.masses import BLOCK, FLAT_VOCAB, masses_of
from sglang_bridge.server.sampling import behaviour
from tests.support.figures import bounded

VOCABS = (1, 5, 300, FLAT_VOCAB, FLAT_VOCAB + 1, FLAT_VOCAB + BLOCK, 152_064)


def logits_of(rows: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("vocab", VOCABS)
def test_log_probs_are_those_of_float64(vocab: int, offset: float):
    logits = logits_of(3, vocab) + offset
    temperature = torch.tensor([[0.3], [1.0], [2.5]])
    norm = masses_of(behaviour(logits, temperature)).norm
    expected = (logits.double() / temperature.double()).log_softmax(-1)
    worst = (norm.logp(logits) - expected).abs().max() / max(1.0, float(expected.abs().max()))
    bounded("masses: log-probs against float64 (of the largest)", float(worst), 3e-7)


@pytest.mark.parametrize("vocab", VOCABS)
def test_every_block_has_its_mass(vocab: int):
    logits = logits_of(2, vocab)
    found = masses_of(behaviour(logits, torch.full((1, 1), 0.7)))
    share = ((logits - logits.amax(1, keepdim=True)).double() / 0.7).exp()
    expected = torch.stack([part.sum(1) for part in share.split(found.width, dim=1)], 1)
    assert found.width == (1 if vocab <= FLAT_VOCAB else BLOCK)
    torch.testing.assert_close(found.mass_Bk.double(), expected, atol=0, rtol=4e-6)
    torch.testing.assert_close(found.edge_Bk[:, -1], expected.sum(1), atol=0, rtol=1e-6)


@pytest.mark.parametrize("vocab", [300, 5000])
def test_a_row_is_the_same_whatever_is_beside_it(vocab: int, monkeypatch: pytest.MonkeyPatch):
    logits, temperature = logits_of(7, vocab), torch.rand(7, 1) + 0.5
    together = masses_of(behaviour(logits, temperature))
    monkeypatch.setattr(masses, "CACHED", 3 * vocab)
    thirds = masses_of(behaviour(logits, temperature))
    assert torch.equal(thirds.mass_Bk, together.mass_Bk)
    for row in range(7):
        alone = masses_of(behaviour(logits[row, None], temperature[row, None]))
        part = together.rows(row, row + 1)
        assert torch.equal(alone.mass_Bk, part.mass_Bk)
        assert torch.equal(alone.edge_Bk, part.edge_Bk)
        assert torch.equal(alone.top_B1, part.top_B1)


def test_nothing_of_the_size_of_the_logits_is_made():
    """Two passes: for a row's top, and, from the cache, for its sums. A kernel makes one."""
    logits = logits_of(32, 49_152)
    with Passes(logits) as counted:
        masses_of(behaviour(logits, torch.full((32, 1), 0.7)))
    assert counted.reads == 2
    assert counted.largest < 0.2


def test_what_is_impossible_weighs_nothing():
    logits = logits_of(4, FLAT_VOCAB + 200)
    logits[0, BLOCK : 2 * BLOCK] = -torch.inf
    logits[1] = -torch.inf
    logits[2, :-1] = -torch.inf
    logits[3, 77] = torch.nan
    found = masses_of(behaviour(logits, torch.ones(1, 1)))
    assert found.mass_Bk[0, 1] == 0
    assert found.mass_Bk[1].eq(0).all()
    assert found.edge_Bk[1, -1] == 0
    assert found.mass_Bk[2].count_nonzero() == 1
    assert np.allclose(found.norm.logp(logits)[2, -1], 0)
    assert found.norm.logp(logits)[3].isnan().all(), "the client refuses it"
    assert found.norm.logp(logits)[:3].isnan().any(1).tolist() == [False, True, False]
