"""The schedule of the learning rate, and what Megatron's schedule is told."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.config.learner import OptimizerConfig
from megatron_opd.learner.optimizer import connect_schedule, learning_rate


@given(st.integers(0, 20), st.integers(1, 60), st.sampled_from(["constant", "cosine"]))
def test_schedule(warmup: int, updates: int, schedule: str):
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=warmup, lr_scheduler=schedule)
    rates = [learning_rate(config, update, updates) for update in range(updates)]
    assert all(0 < rate <= 1e-3 for rate in rates), "no update is wasted at 0"
    rising, rest = rates[: warmup + 1], rates[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rising))
    if rest:
        assert rest[0] == pytest.approx(1e-3)
        assert all(a >= b for a, b in itertools.pairwise(rest))
    if len(rest) > 1:
        assert rest[-1] == pytest.approx(1e-3 if schedule == "constant" else 1e-4)


@pytest.mark.parametrize(
    ("overlap", "last", "tied", "first", "signals"),
    [
        (True, True, False, True, True),
        (True, True, True, False, True),  # the last stage's own copy of the embedding
        (True, True, True, True, False),  # the lookup's gradient arrives, and must be added
        (True, False, False, True, False),
        (False, True, False, True, False),
    ],
)
def test_the_head_signals_its_gradient_where_nothing_else_brings_one(
    overlap: bool, last: bool, tied: bool, first: bool, signals: bool
):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    model = SimpleNamespace(
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=tied,
        shared_embedding_or_output_weight=lambda: weight,
        output_layer=SimpleNamespace(weight=weight),
    )
    ddp = SimpleNamespace(overlap_grad_reduce=overlap)
    chunk: Any = SimpleNamespace(
        module=model, ddp_config=ddp, config=SimpleNamespace(), no_sync="no_sync"
    )
    optimizer: Any = SimpleNamespace(scale_loss="scale_loss")
    connect_schedule([chunk], optimizer)
    assert getattr(weight, "signals_main_grad", False) == signals
    assert chunk.config.no_sync_func == "no_sync"
    assert chunk.config.grad_scale_func == "scale_loss"
