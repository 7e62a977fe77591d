"""The buckets that weights travel in."""

import itertools
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.models.spec import read_model_spec
from megatron_opd.models.tensors import expected_tensors
from megatron_opd.weight_sync.broadcast_sender import plan_buckets
from tests.support.latent_models import tiny_deepseek_v3


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


def test_what_sglang_joins_is_in_one_bucket(tmp_path: Path):
    """It drops what makes the latent of queries, or of keys, where the other is not beside it."""
    model = tiny_deepseek_v3(tmp_path / "model", first_k_dense_replace=3)
    tensors = expected_tensors(read_model_spec(model))
    for limit in (4, 4 * 64 * 40, 4 * 64 * 64, 10**6):
        buckets = plan_buckets([(*each, torch.float32) for each in tensors.items()], limit)
        assert [name for bucket in buckets for name in bucket.names] == list(tensors)
        for layer in range(3):
            both = {f"model.layers.{layer}.self_attn.{part}.weight" for part in PARTS}
            assert [both & {*bucket.names} for bucket in buckets].count(both) == 1, limit


PARTS = ("q_a_proj", "kv_a_proj_with_mqa")


def test_each_tensor_travels_in_its_dtype():
    """A correction bias stays float32 beside weights in bfloat16."""
    manifest = [("w", (8,), torch.bfloat16), ("bias", (4,), torch.float32)]
    (bucket,) = plan_buckets(manifest, 32)
    assert bucket.dtypes == ("bfloat16", "float32")
    assert len(plan_buckets(manifest, 31)) == 2
