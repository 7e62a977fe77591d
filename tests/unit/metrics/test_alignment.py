"""Columns on what a teacher of another tokenizer has scored, against loops over tokens."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.metrics.alignment import alignment_columns
from megatron_opd.records.sample_figures import AlignedScores
from tests.support.fakes import make_sample

SCORES = AlignedScores(np.ones(3, np.uint8), np.zeros(2, np.float32))


def weighed(uid: int, weights: list[float]):
    sample = make_sample(uid, 0, 3)
    draws = replace(sample.rollout.draws, weight_N=np.array(weights, np.float32))
    return replace(sample, rollout=replace(sample.rollout, draws=draws), aligned=SCORES)


def test_shares_are_those_of_all_tokens():
    weights = [[1.0, 0, 0.5, 0.25, 0, 0], [0, 0, 0, 0, 0.25, 0.5]]
    samples = [weighed(uid, own) for uid, own in enumerate(weights)]
    rows = [
        own[first:last]
        for own, sample in zip(weights, samples, strict=True)
        for first, last in zip(
            sample.rollout.draws.offsets_T1[:-1], sample.rollout.draws.offsets_T1[1:], strict=True
        )
    ]
    found = alignment_columns([*samples, make_sample(7)])
    assert found == {
        "aligned_token_fraction": pytest.approx(sum(any(row) for row in rows) / len(rows)),
        "aligned_mass_fraction": pytest.approx(sum(map(sum, rows)) / len(rows)),
    }


def test_without_another_tokenizer_there_are_none():
    assert alignment_columns([make_sample(0)]) == {}
