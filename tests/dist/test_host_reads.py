"""A whole update on a fake card: its values are a CPU's, and its host waits as little as can be."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.host_reads import batches_of, reads_of, run
from tests.dist.layouts import LAYOUTS, TIMES
from tests.support.fake_card import Line
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist

LAYERS = 2
BOUNDS = ("read", "megatron_opd/losses/blocks.py (of)")  # none with Triton's kernels
SPLITS = (
    "synchronize",
    "megatron/core/transformer/moe/token_dispatcher.py (_maybe_dtoh_and_synchronize)",
)
MICRO_BATCH = {"dense": Counter({BOUNDS: 1}), "moe": Counter({BOUNDS: 1, SPLITS: LAYERS})}
UPDATE = Counter(
    {
        ("read", "megatron/core/optimizer/clip_grads.py (get_grad_norm_fp32)"): 1,
        ("read", "megatron_opd/learner/totals.py (on_host)"): 1,
    }
)


@pytest.mark.parametrize("kind", MICRO_BATCH)
def test_an_update_on_a_card_is_a_cpus_and_waits_little(kind: str, tmp_path: Path):
    make = {"dense": tiny_qwen3, "moe": tiny_qwen3_moe}[kind]
    model = make(tmp_path / "model", seed=3, num_hidden_layers=LAYERS)
    batches = batches_of(model, routed=False)
    (there,) = run(LAYOUTS["one rank"], "alone", model, batches, tmp_path / "card")
    (here,) = run(LAYOUTS["one rank"], "alone", model, batches, tmp_path / "cpu", card=False)
    reads = reads_of(there)
    assert by_function(reads.micro_batch) == MICRO_BATCH[kind]
    assert by_function(reads.update) == UPDATE
    assert not any(reads.syncs.values())
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


def by_function(lines: Counter[Line]) -> Counter[tuple[str, str]]:
    """Without line numbers, which every change of a file moves."""
    found: Counter[tuple[str, str]] = Counter()
    for line, count in lines.items():
        found[line.kind, re.sub(r":\d+ ", " ", line.place)] += count
    return found
