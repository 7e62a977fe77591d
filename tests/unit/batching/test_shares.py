"""Samples that are only scored: each comes back once, in order, whatever the layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.batching.shares import scoring_shares
from megatron_opd.config.learner import LearnerConfig
from tests.support.batches import make_sample

LAYOUTS = [{}, {"dp": 3}, {"cp": 2, "dp": 2}, {"pp": 2, "vpp": 2}, {"pp": 3, "vpp": 2, "dp": 2}]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=12),
    st.sampled_from(LAYOUTS),
    st.integers(1, 64),
)
def test_every_sample_comes_back_once_in_order(lengths, parallel, budget):
    config = LearnerConfig.model_validate(
        {"parallel": parallel, "max_tokens_per_microbatch": budget, "num_mini_batches": 3}
    )
    samples = [make_sample(uid, length) for uid, length in enumerate(lengths)]
    cut = scoring_shares(samples, 31, config)
    assert len(cut.shares) == config.parallel.dp
    ranks, least = config.parallel.dp, config.parallel.pp if config.parallel.vpp > 1 else 1
    scored = max(len(samples), ranks * least)
    assert sum(len(share.samples) for share in cut.shares) == scored, "none twice but for want"
    micros = {len(share.plan[0]) for share in cut.shares}
    assert len(micros) == 1, "ranks meet in collectives"
    assert all(len(share.plan) == 1 for share in cut.shares), "one mini-batch"
    if config.parallel.vpp > 1:
        assert micros.pop() >= config.parallel.pp
    # a learner that answers with the ids themselves
    answer = np.concatenate(
        [columns.ids_N[columns.path_T] for columns in (share.columns() for share in cut.shares)]
    )
    for sample, found in zip(samples, cut.by_sample(answer.astype(np.float32)), strict=True):
        assert found.tolist() == sample.rollout.response_ids_T.tolist()


def test_another_number_of_scores_is_refused():
    cut = scoring_shares([make_sample(0, 4)], 9, LearnerConfig())
    with pytest.raises(ValueError, match="4 tokens were to be scored, got 3"):
        cut.by_sample(np.zeros(3, np.float32))
