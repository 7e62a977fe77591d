"""Draws by the inverse CDF against one in float64."""

import numpy as np
import pytest
import torch

from benchmarks.passes import Passes
from sglang_bridge.server.inversion import draw
from sglang_bridge.server.masses import BLOCK, FLAT_VOCAB, masses_of
from sglang_bridge.server.sampling import Behaviour, behaviour
from tests.support.figures import bounded
from tests.support.oracles import chi_square_per_df
from tests.support.selections import uniform

VOCABS = (5, BLOCK, 1000, FLAT_VOCAB, FLAT_VOCAB + 1, FLAT_VOCAB + BLOCK)
EDGES = torch.tensor([0.0, 1e-300, 0.2, 0.5, 1 - 2**-53], dtype=torch.float64)


def logits_of(rows: int, vocab: int, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))


def drawn(policy: Behaviour, uniform_BM: torch.Tensor) -> torch.Tensor:
    return draw(policy, masses_of(policy), uniform_BM)


@pytest.mark.parametrize("scale", [0.1, 3.0, 12.0])
@pytest.mark.parametrize("vocab", [*VOCABS, 152_064])
def test_a_number_has_the_id_whose_interval_holds_it(vocab: int, scale: float):
    """The distance of a number from its id's interval of the float64 CDF is rounding."""
    logits, temperature = logits_of(3, vocab, scale), torch.tensor([[0.6], [1.0], [1.7]])
    numbers = torch.cat([uniform(3, 4000), EDGES.expand(3, -1)], dim=1)
    ids = drawn(behaviour(logits, temperature), numbers)
    probs = (logits.double() / temperature.double()).softmax(-1)
    above = probs.cumsum(-1).gather(1, ids)
    outside = torch.maximum(above - probs.gather(1, ids) - numbers, numbers - above)
    bounded("draws: a number from its id's interval", float(outside.max()), 1e-7)
    assert (outside < 0).double().mean() > (0.9 if vocab > 10**5 else 0.99)


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_follow_the_probabilities(vocab: int):
    logits = logits_of(3, vocab)
    ids = drawn(behaviour(logits, torch.full((3, 1), 0.9)), uniform(3, 40_000))
    exact = (logits.double() / 0.9).softmax(-1).numpy()
    for row in range(3):
        counts = np.bincount(ids[row].numpy(), minlength=vocab)
        ratio, df = chi_square_per_df(counts, exact[row])
        assert abs(ratio - 1) < 6 * (2 / df) ** 0.5, (row, ratio, df)


def test_every_id_of_a_large_vocabulary_can_be_drawn():
    """In a float32 cumulative sum the ids after the spike would all share one edge."""
    probs = torch.full((1, 152_064), 1e-9)
    probs[0, 7] = 1.0
    up_to = torch.linspace(100_000, 101_000, 4000, dtype=torch.float64)  # ids of 1e-9
    numbers = (1 + 1e-9 * up_to[None]) / (1 + 152_063e-9)
    ids = drawn(behaviour(probs.log(), torch.ones(1, 1)), numbers)[0]
    assert (ids.diff() >= 0).all()
    distinct, times = ids.unique(return_counts=True)
    assert (distinct.diff() == 1).all(), "an id was left out"
    assert len(distinct) > 900
    assert times[1:-1].max() <= 6


@pytest.mark.parametrize("vocab", [3 * BLOCK, FLAT_VOCAB + BLOCK, FLAT_VOCAB + BLOCK + 9])
def test_zero_probability_is_never_drawn(vocab: int):
    logits = torch.full((3, vocab), -torch.inf)
    logits[0, [3, BLOCK + 9, 2 * BLOCK - 1]] = torch.tensor([0.2, 1e-30, 0.8]).log()
    logits[1, BLOCK] = 50.0
    logits[2, vocab - 1] = -50.0
    ids = drawn(
        behaviour(logits, torch.ones(1, 1)),
        torch.cat([uniform(3, 5000), EDGES.expand(3, -1)], dim=1),
    )
    assert logits.gather(1, ids).isfinite().all()
    assert (ids[1] == BLOCK).all()
    assert (ids[2] == vocab - 1).all()
    assert ids[0, 5000] == 3, "a target of 0 belongs to the first id that has mass"


def test_a_draw_reads_a_block_and_not_the_vocabulary():
    logits = logits_of(16, 49_152)
    policy = behaviour(logits, torch.ones(16, 1))
    found = masses_of(policy)
    with Passes(logits) as counted:
        draw(policy, found, uniform(16, 4))
    assert counted.reads == 4 * BLOCK / 49_152
    assert counted.moved < 0.4


def test_rows_of_a_step_do_not_change_each_other():
    logits, numbers = logits_of(5, 6000), uniform(5, 32)
    together = drawn(behaviour(logits, torch.ones(1, 1)), numbers)
    for row in range(5):
        policy = behaviour(logits[row, None], torch.ones(1, 1))
        assert torch.equal(drawn(policy, numbers[row, None, :9]), together[row, None, :9])
