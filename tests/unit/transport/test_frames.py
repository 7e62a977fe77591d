"""The columns of a rank's batch travel unchanged or are refused."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.batching.rank_batch import rank_batch
from megatron_opd.columns import COLUMNS, RankBatch
from megatron_opd.transport.frames import EXPERT_FRAMES, from_frames, to_frames
from megatron_opd.types import Batch, Sample
from tests.support.batches import make_batch, make_sample


def columns_of(count: int) -> RankBatch:
    batch = make_batch(count)
    return rank_batch(batch.update, batch.version, batch.samples, [[list(range(count))]])


def test_columns_travel_unchanged():
    share = columns_of(4)
    back = from_frames(share.update, share.version, share.plan, to_frames(share))
    for name, dtype in COLUMNS.items():
        assert getattr(back, name).dtype == dtype
        np.testing.assert_array_equal(getattr(back, name), getattr(share, name))
    # path_T indexes into the columns, not into its own sample
    starts = np.cumsum(share.count_T) - share.count_T
    assert ((back.path_T >= starts) & (back.path_T < starts + back.count_T)).all()
    assert list(back.version_T[: back.response_B[0]]) == [0, 1]


@pytest.mark.parametrize("name", [name for name in COLUMNS if name not in ("prompt_B",)])
def test_a_truncated_column_is_refused(name: str):
    frames = dict(zip([*COLUMNS, *EXPERT_FRAMES], to_frames(columns_of(3)), strict=True))
    frames[name] = frames[name][: -COLUMNS[name].itemsize]
    with pytest.raises(ValueError, match="must have length"):
        from_frames(0, 0, [[[0]]], list(frames.values()))
    with pytest.raises(ValueError, match="18 columns, got 17 frames"):
        from_frames(0, 0, [[[0]]], list(frames.values())[1:])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routed_experts_travel_with_their_samples(dtype: type):
    batch = make_batch(3)
    rng = np.random.default_rng(5)
    parts = [
        rng.integers(0, 200, (sample.rollout.num_tokens - 1, 3, 2)).astype(dtype)
        for sample in batch.samples
    ]
    samples = [
        replace(sample, rollout=replace(sample.rollout, experts_XLk=part))
        for sample, part in zip(batch.samples, parts, strict=True)
    ]
    frames = to_frames(rank_batch(0, 0, samples, [[[0, 1, 2]]]))
    back = from_frames(0, 0, [[[0, 1, 2]]], frames)
    found = back.experts_of([2, 0])
    assert found is not None
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.concatenate([parts[2], parts[0]]))
    assert columns_of(3).experts_of([1]) is None
    with pytest.raises(ValueError, match="column experts_XLk must have length"):
        from_frames(
            0, 0, [[[0, 1, 2]]], [*frames[:-2], frames[-2][: -6 * parts[0].itemsize], frames[-1]]
        )
    with pytest.raises(ValueError, match="got 2 of 3, 1 kinds"):
        rank_batch(0, 0, [*samples[:2], batch.samples[2]], [[[0, 1, 2]]])
    short = replace(samples[0], rollout=replace(samples[0].rollout, experts_XLk=parts[0][:-1]))
    with pytest.raises(ValueError, match="experts_XLk must have length"):
        rank_batch(0, 0, [short, *samples[1:]], [[[0, 1, 2]]])


def weighed_samples(batch: Batch) -> list[Sample]:
    """With experts and their weights; the input is in both."""
    samples: list[Sample] = []
    for sample in batch.samples:
        inputs = sample.rollout.num_tokens - 1
        experts = np.arange(inputs * 6, dtype=np.uint8).reshape(inputs, 3, 2)
        gates = (experts / 512).astype(np.float32)
        rollout = replace(sample.rollout, experts_XLk=experts, gates_XLk=gates)
        samples.append(replace(sample, rollout=rollout))
    return samples


def test_gate_weights_travel_with_their_samples():
    batch, plan = make_batch(3), [[[0, 1, 2]]]
    samples = weighed_samples(batch)
    frames = to_frames(rank_batch(0, 0, samples, plan))
    back = from_frames(0, 0, plan, frames)
    found = back.gates_of([2, 0])
    assert found is not None
    assert found.dtype == np.float32
    expected = [samples[i].rollout.gates_XLk for i in (2, 0)]
    np.testing.assert_array_equal(found, np.concatenate(expected))
    experts = back.experts_of([2, 0])
    assert experts is not None
    np.testing.assert_array_equal(found, (experts / 512).astype(np.float32))
    assert columns_of(3).gates_of([1]) is None
    for raw in (frames[-1][:-4], frames[-1][:-1], bytes(frames[-1]) + b"abcd"):
        with pytest.raises(ValueError, match=r"column gates_XLk of \d+ bytes cannot be of \d+"):
            from_frames(0, 0, plan, [*frames[:-1], memoryview(raw)])
    empty = memoryview(b"")
    with pytest.raises(ValueError, match="column gates_XLk of 4 bytes cannot be of 0 experts"):
        from_frames(0, 0, plan, [*frames[:-3], empty, empty, memoryview(b"abcd")])
    last = replace(samples[2], rollout=replace(samples[2].rollout, gates_XLk=None))
    with pytest.raises(ValueError, match=r"all carry gate weights .* got 2 of 3, 1 kinds"):
        rank_batch(0, 0, [*samples[:2], last], plan)
    for changes in ({"gates_XLk": np.zeros((1, 3, 2), np.float32)}, {"experts_XLk": None}):
        odd = replace(samples[0], rollout=replace(samples[0].rollout, **changes))
        with pytest.raises(ValueError, match="sample 0: gates_XLk must have shape"):
            rank_batch(0, 0, [odd, *samples[1:]], plan)


@pytest.mark.parametrize("name", ["weight_N", "sampler_logp_N", "path_T"])
def test_a_malformed_sample_is_named(name: str):
    sample = make_sample(7, 4)
    draws = replace(sample.rollout.draws, **{name: getattr(sample.rollout.draws, name)[:-1]})
    broken = replace(sample, rollout=replace(sample.rollout, draws=draws))
    with pytest.raises(ValueError, match=f"sample 7: {name} must have length"):
        rank_batch(0, 0, [broken], [[[0]]])
