"""Samples that are only scored: each comes back once, in order, whatever the layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.batching.checks import check_batch
from megatron_opd.batching.shares import scoring_shares, shares
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.records.types import Batch
from tests.support.batches import make_sample
from tests.support.trajectories import VOCAB, layouts, trajectory

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
    assert sum(len(share.sequences) for share in cut.shares) == scored, "none twice but for want"
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(layouts, min_size=6, max_size=9).filter(lambda made: len(made) % 3 == 0),
    st.sampled_from(LAYOUTS),
    st.integers(1, 64),
)
def test_the_sequences_of_trajectories_are_dealt_once_whole_and_come_back(made, parallel, budget):
    config = LearnerConfig.model_validate(
        {"parallel": parallel, "max_tokens_per_microbatch": budget}
    )
    samples = [trajectory(uid, layout) for uid, layout in enumerate(made)]
    cut = scoring_shares(samples, 31, config)
    answer = np.concatenate(
        [columns.ids_N[columns.path_T] for columns in (share.columns() for share in cut.shares)]
    )
    for sample, found in zip(samples, cut.by_sample(answer.astype(np.float32)), strict=True):
        assert found.tolist() == sample.rollout.response_ids_T.tolist()
    dealt = shares(Batch(0, 31, tuple(samples)), config, Estimator(), 1)
    held = [(each.sample.rollout.prompt.uid, each.sequence) for s in dealt for each in s.sequences]
    whole = [(uid, number) for uid, layout in enumerate(made) for number in range(len(layout))]
    assert sorted(held) == whole, "each sequence of each sample once"
    for share in dealt:
        columns = share.columns()
        check_batch(columns, vocab_size=VOCAB, num_experts=0, sampled=True)
        sizes = [each.size for each in share.sequences]
        assert columns.length_B.tolist() == [size.tokens for size in sizes]
        assert columns.response_B.tolist() == [size.sampled for size in sizes]
    assert sum(share.groups.share_B.sum() for share in dealt) == pytest.approx(len(samples))


def test_another_number_of_scores_is_refused():
    cut = scoring_shares([make_sample(0, 4)], 9, LearnerConfig())
    with pytest.raises(ValueError, match="4 tokens were to be scored, got 3"):
        cut.by_sample(np.zeros(3, np.float32))
