"""Figures of samples are the same wherever their arrays are."""

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.metrics.cache_size import CacheSizes
from megatron_opd.metrics.teacher_health import TeacherWatch
from megatron_opd.records.sample_figures import NEAR_NATS, ScoreShape
from megatron_opd.records.types import Batch, HeldSample, Sample
from tests.support.fakes import held_rollout, make_sample

V = 100
SCORES = st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=50)


@given(st.lists(SCORES, min_size=1, max_size=5))
def test_joined_figures_are_those_of_all_scores(lots: list[list[float]]):
    arrays = [np.array(lot, np.float32) for lot in lots]
    found = reduce(ScoreShape.joined, (ScoreShape.of(array, V) for array in arrays))
    whole = np.concatenate(arrays).astype(np.float64)
    assert found.rows == len(whole)
    assert found.mean == pytest.approx(whole.mean(), abs=1e-9)
    assert found.std == pytest.approx(whole.std(), abs=1e-6)
    near = np.abs(whole + np.log(V)) < NEAR_NATS
    assert found.near_uniform == near.sum()
    assert found.near_uniform_fraction == near.mean()


def scored(uid: int, scores: list[float]) -> Sample:
    sample = make_sample(uid, num_tokens=len(scores))
    scores_N = np.full(sample.rollout.num_ids, -30, np.float32)
    scores_N[sample.rollout.draws.path_T] = scores
    return Sample(sample.rollout, scores_N)


def held(sample: Sample) -> HeldSample:
    """What stands for a sample that a data worker holds."""
    return HeldSample(held_rollout(sample.rollout, "k", sample.cache), sample.scores(V))


@given(st.lists(SCORES, min_size=1, max_size=4))
def test_observers_see_the_same_of_a_sample_that_is_elsewhere(lots: list[list[float]]):
    here = [scored(uid, scores) for uid, scores in enumerate(lots)]
    figures = []
    for samples in (here, [held(sample) for sample in here]):
        batch, cache = Batch(0, 0, tuple(samples)), CacheSizes()
        cache.add(batch)
        watch = TeacherWatch({"teacher": V}, alarm=True, stop_after=0)
        figures.append(
            (
                *(cache.bytes_per_token, cache.distinct_ids_per_token, cache.cached_ids_per_token),
                watch.columns(batch),
            )
        )
    assert figures[0] == figures[1]
