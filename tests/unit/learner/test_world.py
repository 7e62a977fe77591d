"""How the world is formed: with which backend, and which of its groups are gloo's."""

from typing import Any

import pytest
import torch

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.learner import world


class Asked(Exception):
    """Ends the start once the question is answered."""


@pytest.mark.parametrize(("cuda", "backend"), [(True, "nccl"), (False, "gloo")])
def test_no_group_is_bound_to_a_device(monkeypatch: pytest.MonkeyPatch, cuda: bool, backend: str):
    """With device_id the ranks outside a gloo group would wait in ncclCommSplit for ever."""
    seen: dict[str, Any] = {}

    def init(name: str, **options: Any) -> None:
        seen.update(options, backend=name)
        raise Asked

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(world.dist, "init_process_group", init)
    with pytest.raises(Asked):
        world.init_world(ParallelConfig(), 0, None, 60.0)
    assert seen["backend"] == backend
    assert seen.get("device_id") is None
    assert devices == ([torch.device("cuda", 3)] if cuda else []), "the device comes from here"


def test_groups_that_wait_for_the_controller_are_gloo_groups(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        world.dist, "new_group", lambda ranks, **options: seen.update(options, ranks=ranks)
    )
    world._group({3, 1})
    assert seen["ranks"] == [1, 3]
    assert seen["backend"] == "gloo"
    assert seen["timeout"].days == 30
