"""What Megatron's pipeline schedule is told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_opd.learner.optimizer import connect_pipeline_schedule


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
    connect_pipeline_schedule([chunk], optimizer)
    assert getattr(weight, "signals_main_grad", False) == signals
    assert chunk.config.no_sync_func == "no_sync"
    assert chunk.config.grad_scale_func == "scale_loss"
