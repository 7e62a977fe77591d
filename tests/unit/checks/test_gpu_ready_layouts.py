"""What a rank holds otherwise than a weight sync plans is told."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from checks.gpu_ready.layouts import (
    NAMES,
    Slice,
    built_slices,
    differences,
    planned_slices,
    ranks_of,
)
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.views import View
from megatron_opd.weight_sync.holdings import learner_holdings
from tests.support.published import spec_of


def held(rank: int) -> dict[str, Slice]:
    spec = replace(spec_of("Qwen3-30B-A3B"), num_layers=2, moe_layers=(True, True))
    return planned_slices(learner_holdings(spec, ParallelConfig(tp=4, pp=2, dp=2, ep=4)), rank)


QUERIES = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.32.down_proj.weight"


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        (lambda built: built.pop(QUERIES), f"{QUERIES} is planned and not built"),
        (
            lambda built: built.update({QUERIES: replace(built[QUERIES], start=0)}),
            f"{QUERIES} is planned as",
        ),
        (
            lambda built: built.update({EXPERT: replace(built[EXPERT], others=(767,))}),
            f"{EXPERT} is planned as",
        ),
        (
            lambda built: built.update({"lm_head.weight": built[QUERIES]}),
            "lm_head.weight is built and not planned",
        ),
    ],
)
def test_a_rank_that_holds_something_else_than_planned_is_told(
    plant: Callable[[dict[str, Slice]], Any], line: str
):
    planned = held(1)
    assert planned[QUERIES] == Slice(0, 1024, 1024, (2048,))
    assert differences(planned, dict(planned)) == []
    built = dict(planned)
    plant(built)
    [found] = differences(planned, built)
    assert found.startswith(line)


def test_what_a_rank_built_is_read_from_its_views():
    spec = replace(spec_of("Qwen3-30B-A3B"), num_layers=1, moe_layers=(True,))
    meta = torch.device("meta")
    group = [View(QUERIES, 0, start, torch.empty(512, 2048, device=meta)) for start in (2048, 1536)]
    whole = View("model.norm.weight", 0, 0, torch.empty(2048, device=meta))
    padding = View("lm_head.weight", 0, 151_936, torch.empty(0, 2048, device=meta))
    found = built_slices(
        {QUERIES: group, "model.norm.weight": [whole], "lm_head.weight": [padding]}, spec
    )
    assert found == {
        QUERIES: Slice(0, 1536, 1024, (2048,)),
        "model.norm.weight": Slice(0, 0, 2048, ()),
    }


def test_ranks_of_every_kind_of_stage_are_built():
    assert ranks_of(3, 1) == [0, 2]
    assert ranks_of(16, 2) == [0, 7, 8, 15]
    assert ranks_of(64, 8) == [0, 7, 32, 39, 56, 63]
    assert len(NAMES) == 3
