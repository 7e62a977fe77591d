"""Ids that are only padding have probability 0 on a server, as they have in the learner."""

import multiprocessing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_bridge.server import plugin
from sglang_bridge.server.compat import hooks, ranks, startup
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.selection import Wanted, select
from sglang_bridge.server.spec import ENABLED_VARIABLE, NUM_IDS_VARIABLE

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


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(hooks, "hook", lambda target, *_: found.append(target))
    monkeypatch.setattr(startup, "bind_stores", lambda: None)
    monkeypatch.setattr(ranks, "allow_deterministic_attention", lambda _: None)
    return found


def test_sglangs_own_command_is_changed_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, hooked: list[str]
):
    monkeypatch.delenv(ENABLED_VARIABLE)
    monkeypatch.setattr(hooks, "version", lambda _: "0.5.22")
    plugin.register()
    assert hooked == []


def test_another_sglang_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, hooked: list[str], capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(hooks, "version", lambda _: "0.5.22")
    with pytest.raises(SystemExit) as ended:
        plugin.register()
    assert (ended.value.code, hooked) == (2, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: sglang_bridge supports sglang {hooks.SUPPORTED}, found 0.5.22")
    assert line.endswith(f"or start it without {ENABLED_VARIABLE}=1")


def test_workers_get_no_routes(monkeypatch: pytest.MonkeyPatch, hooked: list[str]):
    plugin.register()
    assert hooks.SERVE in hooked
    hooked.clear()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "another")
    plugin.register()
    assert len(hooked) > 10
    assert hooks.SERVE not in hooked
