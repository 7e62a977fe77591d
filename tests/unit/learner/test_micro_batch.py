"""Micro-batches of ranks that are sent no draw cache."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_opd.learner.layout import PackLayout
from megatron_opd.learner.micro_batch import CacheElsewhere, distil_micros, sft_micro
from megatron_opd.learner.routing import Routing
from megatron_opd.records.columns import RankInputs
from tests.support.batches import make_shares

(SHARE,) = make_shares(parallel={"dp": 1})
WHOLE = SHARE.columns()
INPUTS = RankInputs(**{field.name: getattr(WHOLE, field.name) for field in fields(RankInputs)})
LAYOUT = PackLayout(torch.device("cpu"))


def test_without_a_cache_the_positions_are_the_same():
    for ours, theirs in zip(
        distil_micros(INPUTS, 0, LAYOUT), distil_micros(WHOLE, 0, LAYOUT), strict=True
    ):
        assert ours.held is None
        assert theirs.loss_input.id_N.numel() > 0
        assert torch.equal(ours.rows.ids_1s, theirs.rows.ids_1s)
        assert torch.equal(ours.rows.logit_row_t, theirs.rows.logit_row_t)
        np.testing.assert_array_equal(ours.rows.source_s, theirs.rows.source_s)


def test_a_cache_that_is_elsewhere_is_no_zeros():
    micro = distil_micros(INPUTS, 0, LAYOUT)[0]
    where = "this rank holds no draw cache: ranks of the last pipeline stage alone do"
    with pytest.raises(CacheElsewhere, match=where):
        _ = micro.loss_input
    with pytest.raises(CacheElsewhere, match=where):
        micro.cache(torch.zeros(1), prox_is_student=False)


def with_filler(batch: RankInputs) -> RankInputs:
    """The same share, of a rank that has fewer micro-batches than others."""
    return replace(batch, plan=[[*mini, []] for mini in batch.plan])


def test_a_filler_holds_nothing_and_changes_nothing_else():
    whole = distil_micros(WHOLE, 0, LAYOUT)
    *others, filler = distil_micros(with_filler(WHOLE), 0, LAYOUT)
    assert filler.held is None
    assert filler.rows.is_filler
    assert len(others) == len(whole)
    assert not any(micro.rows.is_filler for micro in others)
    supervised = sft_micro([], [], LAYOUT)
    assert supervised.rows.is_filler
    assert len(supervised.response_T) == 0


def test_a_filler_routes_freely_and_counts_nothing():
    spec: Any = SimpleNamespace(routed_scale=1)
    replay = Routing("rollout", "sampler", spec, (0, 1), torch.device("cpu"), 1, 0)
    experts = np.zeros((len(INPUTS.ids_S) - len(INPUTS.length_B), 2, 3), np.uint8)
    routed = replace(INPUTS, experts_XLk=experts, gates_XLk=experts.astype(np.float32))
    *_, filler = distil_micros(with_filler(routed), 0, LAYOUT, replay)
    routing = filler.rows.packing.routing
    own_mk = torch.arange(3)[None]
    for layer in (0, 1):
        assert torch.equal(routing.experts(layer, own_mk), own_mk)
        assert routing.gates_of(layer).tolist() == [[-1] * 3]
    assert routing.counts().tolist() == [0] * 4
