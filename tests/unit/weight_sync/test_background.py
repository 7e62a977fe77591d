"""A version that is on its way stays what it was, whatever becomes of the learner's weights."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_opd.models.families.keys import Key
from megatron_opd.models.gather import FullTensors
from megatron_opd.models.shards import Shard
from megatron_opd.weight_sync.background import Background

KEY = Key(0, 0, None)


def full_of(value: float) -> FullTensors:
    """The tensors of one rank with one shard, without a world."""
    full = FullTensors.__new__(FullTensors)
    world: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, size=1)
    row: Any = SimpleNamespace(dim=0)
    full.world, full.entries = world, []
    parameter = torch.nn.Parameter(torch.full((3, 2), value))
    full.shards = {KEY: Shard(KEY, row, ("w",), parameter, 0, 1)}
    return full


def give(full: FullTensors, value: float) -> None:
    with torch.no_grad():
        full.shards[KEY].parameter.fill_(value)


def held(full: FullTensors) -> float:
    (value,) = full.shards[KEY].parameter.unique().tolist()
    return value


def test_what_is_sent_is_the_version_that_was_kept():
    full = full_of(1.0)
    background, taken, sent = Background(full), threading.Event(), list[float]()
    assert background.copy.shards[KEY].parameter.requires_grad is False

    def send() -> None:
        assert taken.wait(10)
        sent.append(held(background.copy))

    for version, value in ((1, 2.0), (2, 4.0)):
        give(full, value)
        background.keep(version)
        taken.clear()
        background.begin(send)
        give(full, -1.0)  # an optimizer step
        taken.set()
        assert background.end() is None
        background.keep(version)  # sent once more: not what the learner has by now
        assert held(background.copy) == value
    assert sent == [2.0, 4.0]


def test_why_it_was_not_sent_is_told_once_and_what_breaks_is_raised():
    background = Background(full_of(1.0))
    assert background.end() is None
    background.begin(lambda: "http://a:1 rank 0 did not take its weights")
    with pytest.raises(AssertionError, match="the copy is being sent"):
        background.keep(1)
    assert background.end() == "http://a:1 rank 0 did not take its weights"
    assert background.end() is None

    def breaks() -> None:
        raise KeyError("w")

    background.begin(breaks)
    with pytest.raises(KeyError, match="w"):
        background.end()
    background.keep(1)
