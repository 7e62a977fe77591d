"""Staleness of tokens."""

from dataclasses import replace

from megatron_opd.metrics.staleness import StalenessCounts
from megatron_opd.records.types import Batch, VersionSpan
from tests.support.fakes import make_prompt, make_rollout, make_sample


def test_staleness_counts_tokens_and_partial_rollouts():
    spans = (VersionSpan(2, 0, 3), VersionSpan(4, 3, 4))
    samples = (
        make_sample(0, 5),
        replace(make_sample(1), rollout=make_rollout(make_prompt(1), spans)),
    )
    counts = StalenessCounts()
    counts.add(Batch(5, 5, samples))
    assert counts.tokens.as_json() == {"0": 4, "1": 1, "3": 3}
    assert counts.samples.as_json() == {"0": 1, "3": 1}
    assert counts.partial_rollouts == 1
