"""A whole update on fake cards: its values are a CPU's, and its reads by the host are few."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.host_reads import batches_of, lines_of, reads_of, run, waits
from tests.dist.layouts import LAYOUTS, TIMES
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_an_update_on_a_card_is_a_cpus_and_reads_little(kind: str, tmp_path: Path):
    make = {"dense": tiny_qwen3, "moe": tiny_qwen3_moe}[kind]
    model = make(tmp_path / "model", seed=3, num_hidden_layers=4)
    batches = batches_of(model, routed=False)
    (there,) = run(LAYOUTS["one rank"], "alone", model, batches, tmp_path / "card")
    (here,) = run(LAYOUTS["one rank"], "alone", model, batches, tmp_path / "cpu", card=False)
    for card, plain in zip(there["updates"], here["updates"], strict=True):
        for figures in (card["metrics"], plain["metrics"]):
            for name in TIMES:
                del figures[name]
        assert card["metrics"] == plain["metrics"]
    for name, sync in there["syncs"].items():
        assert sync["sent"] == here["syncs"][name]["sent"], name
    weights = [load_file(tmp_path / out / "after" / "model.safetensors") for out in ("card", "cpu")]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
    print(reads_of(there))
