"""Packed attention against a softmax written out."""

import math

import pytest
import torch

from megatron_opd.learner.attention import PackedAttention, Packing

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
