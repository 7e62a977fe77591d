"""Packed attention against a softmax written out, the schedule, and publication buckets."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.config.learner import OptimizerConfig
from megatron_opd.learner.attention import PackedAttention, Packing
from megatron_opd.learner.optimizer import learning_rate
from megatron_opd.weight_sync.sender import plan_buckets

HEADS, KV_HEADS, SIZE = 4, 2, 8


def attention() -> PackedAttention:
    module = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module.scale = 1 / math.sqrt(SIZE)
    return module


def slow_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One segment, [L, heads, d], position by position."""
    out = torch.zeros_like(q)
    for position in range(len(q)):
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = k[: position + 1, shared] @ q[position, head] / math.sqrt(SIZE)
            out[position, head] = scores.softmax(0) @ v[: position + 1, shared]
    return out.flatten(1)


@pytest.mark.parametrize("lengths", [(5,), (3, 4, 5), (1, 1), (20, 1, 1, 1, 2)])
def test_packed_attention_sees_its_own_segment_only(lengths: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), 1)
    q, k, v = (
        torch.randn(*shape, heads, SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    packing = Packing.of(lengths, torch.device("cpu"))
    assert (packing.keys.padded_S is None) == (len(lengths) == 5), "both paths must be covered"
    out = attention()(q, k, v, packed_seq_params=packing)
    parts = zip(*(x[:, 0].split(lengths) for x in (q, k, v)), strict=True)
    expected = torch.cat([slow_attention(*part) for part in parts])[:, None]
    torch.testing.assert_close(out, expected)
    probe = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad((out * probe).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * probe).sum(), (q, k, v))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_positions_restart_in_every_segment():
    packing = Packing.of((3, 1, 2), torch.device("cpu"))
    assert packing.positions_s.tolist() == [0, 1, 2, 0, 0, 1]


@given(st.integers(0, 20), st.integers(1, 60), st.sampled_from(["constant", "cosine"]))
def test_schedule(warmup: int, updates: int, schedule: str):
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=warmup, lr_scheduler=schedule)
    rates = [learning_rate(config, update, updates) for update in range(updates)]
    assert all(0 < rate <= 1e-3 for rate in rates), "no update is wasted at 0"
    rising, rest = rates[: warmup + 1], rates[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rising))
    if rest:
        assert rest[0] == pytest.approx(1e-3)
        assert all(a >= b for a, b in itertools.pairwise(rest))
    if len(rest) > 1:
        assert rest[-1] == pytest.approx(1e-3 if schedule == "constant" else 1e-4)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(4, 200))
def test_buckets_hold_everything_in_order_within_their_limit(sizes: list[int], limit: int):
    manifest = [(f"t{i}", (size,)) for i, size in enumerate(sizes)]
    buckets = plan_buckets(manifest, torch.float32, limit)
    assert [name for bucket in buckets for name in bucket.names] == [name for name, _ in manifest]
    for bucket in buckets:
        assert sum(4 * shape[0] for shape in bucket.shapes) <= limit or len(bucket.names) == 1
        assert set(bucket.dtypes) == {"float32"}
    for bucket, after in itertools.pairwise(buckets):
        together = sum(4 * shape[0] for shape in (*bucket.shapes, after.shapes[0]))
        assert together > limit, "no bucket is closed early"
