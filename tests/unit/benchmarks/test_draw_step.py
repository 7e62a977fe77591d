"""What is compared in draw_step is the same, and passes are counted as they are made."""

import numpy as np
import pytest
import torch

from benchmarks import dense_draws, draw_step
from benchmarks.passes import Passes
from sglang_bridge.server.rows import build_rows, forced
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.selection import Wanted, select


@pytest.mark.parametrize("support", draw_step.SUPPORTS)
@pytest.mark.parametrize("vocab", [300, 6000])
def test_both_ways_record_the_same(vocab: int, support: str):
    """Rounding may move a draw at the edge of an id's interval."""
    atoms, draws = draw_step.SUPPORTS[support]
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(4, vocab, generator=generator)
    wanted = Wanted(np.full(4, atoms), np.full(4, draws))
    numbers = torch.rand(4, draws, dtype=torch.float64, generator=generator)
    path, temperature = torch.tensor([[0], [1], [2], [3]]), torch.full((4, 1), 0.8)
    ids, weight, logp = dense_draws.recorded(logits, temperature, path, wanted, numbers)
    known = (logits / 0.8).log_softmax(-1).gather(1, path)
    policy = behaviour(logits, temperature)
    rows = build_rows(select(policy, wanted, numbers), forced(path, known))
    assert (rows.ids_BR == ids).double().mean() > 0.95
    same = (rows.ids_BR == ids).all(1)
    assert same.sum() >= 3
    torch.testing.assert_close(rows.weight_BR[same], weight[same], atol=1e-6, rtol=1e-5)
    used = torch.arange(ids.shape[1]) < rows.length_B[:, None]
    torch.testing.assert_close(rows.logp_BR[used & same[:, None]], logp[used & same[:, None]])


def test_passes_are_those_of_the_operations():
    matrix = torch.randn(10, 100)
    with Passes(matrix) as counted:
        matrix.amax(1)
    assert (counted.reads, counted.moved, counted.largest) == (1, 1.01, 0.01)
    with Passes(matrix) as counted:
        below = matrix[5:] - 1.0  # a view moves nothing
        below.exp_()
    assert (counted.reads, counted.moved, counted.largest) == (0.5, 2, 0.5)
    assert counted.operations == 2
    with Passes(matrix) as counted:
        matrix.gather(1, torch.zeros(10, 3, dtype=torch.int64))
    assert counted.reads == 0.03
    assert counted.largest == 0.03
