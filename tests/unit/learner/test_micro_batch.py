"""Micro-batches of ranks that are sent no draw cache."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from megatron_opd.columns import RankInputs
from megatron_opd.learner.layout import PackLayout
from megatron_opd.learner.micro_batch import CacheElsewhere, distil_micros
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
