"""Ids that are only padding have probability 0 on a server, as they have in the learner."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_bridge.server import plugin
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.selection import Wanted, select
from sglang_bridge.server.spec import NUM_IDS_VARIABLE

ROWS, IDS = 40, 29


def made(*_: object) -> torch.Tensor:
    logits_BV = torch.randn(3, ROWS, generator=torch.Generator().manual_seed(1))
    logits_BV[:, IDS:] += 9  # padding that would be drawn nearly always
    return logits_BV


def test_what_is_drawn_and_its_log_probs_are_of_the_ids_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(NUM_IDS_VARIABLE, str(IDS))
    policy = behaviour(plugin.around_logits(made), torch.ones(3, 1))
    expected_BV = made()[:, :IDS].double().log_softmax(-1)
    for atoms in (0, IDS):
        atoms_B, draws_B = (np.full(3, count) for count in (atoms, 64))
        generator = torch.Generator().manual_seed(2)
        uniform_BM = torch.rand(3, 64, dtype=torch.float64, generator=generator)
        selected = select(policy, Wanted(atoms_B, draws_B), uniform_BM)
        used_BS = selected.weight_BS > 0
        assert int(selected.ids_BS[used_BS].max()) < IDS
        logp_BS = expected_BV.gather(1, selected.ids_BS.clamp(max=IDS - 1))
        torch.testing.assert_close(
            selected.logp_BS[used_BS].double(), logp_BS[used_BS], rtol=1e-5, atol=1e-5
        )


def test_the_server_counts_no_more_ids(monkeypatch: pytest.MonkeyPatch):
    model: Any = SimpleNamespace(vocab_size=ROWS)
    assert plugin.num_ids(model.vocab_size) == ROWS
    torch.testing.assert_close(plugin.around_logits(made), made())
    monkeypatch.setenv(NUM_IDS_VARIABLE, str(IDS))
    assert plugin.num_ids(model.vocab_size) == IDS
