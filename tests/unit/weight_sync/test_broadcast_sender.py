"""The buckets that weights travel in."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.weight_sync.broadcast_sender import plan_buckets


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(4, 200))
def test_buckets_hold_everything_in_order_within_their_limit(sizes: list[int], limit: int):
    manifest = [(f"t{i}", (size,), torch.float32) for i, size in enumerate(sizes)]
    buckets = plan_buckets(manifest, limit)
    assert [name for bucket in buckets for name in bucket.names] == [name for name, *_ in manifest]
    for bucket in buckets:
        assert sum(4 * shape[0] for shape in bucket.shapes) <= limit or len(bucket.names) == 1
        assert set(bucket.dtypes) == {"float32"}
    for bucket, after in itertools.pairwise(buckets):
        together = sum(4 * shape[0] for shape in (*bucket.shapes, after.shapes[0]))
        assert together > limit, "no bucket is closed early"


def test_each_tensor_travels_in_its_dtype():
    """A correction bias stays float32 beside weights in bfloat16."""
    manifest = [("w", (8,), torch.bfloat16), ("bias", (4,), torch.float32)]
    (bucket,) = plan_buckets(manifest, 32)
    assert bucket.dtypes == ("bfloat16", "float32")
    assert len(plan_buckets(manifest, 31)) == 2
