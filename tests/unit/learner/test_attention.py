"""Packed attention against a softmax written out, rotary positions against transformers."""

import math
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import (
    _apply_rotary_pos_emb_bshd,  # pyright: ignore[reportPrivateUsage]
)
from transformers import Glm4Config, Phi3Config
from transformers.models.glm4 import modeling_glm4
from transformers.models.phi3 import modeling_phi3

from megatron_opd.learner.attention import (
    PackedAttention,
    PackedRotary,
    Packing,
    rotary_frequencies,
)
from megatron_opd.models.rope import Rope

HEADS, KV_HEADS, SIZE = 4, 2, 8


def attention(window: int | None, sinks: torch.nn.Parameter | None) -> PackedAttention:
    module = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module.scale = 1 / math.sqrt(SIZE)
    module.window = window
    module.register_parameter("softmax_offset", sinks)
    return module


def slow_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One segment, [L, heads, d], position by position. sinks: [heads]."""
    out = torch.zeros_like(q)
    for position in range(len(q)):
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            seen = slice(max(0, position + 1 - (window or len(q))), position + 1)
            scores = k[seen, shared] @ q[position, head] / math.sqrt(SIZE)
            sink = scores[:0] if sinks is None else sinks[head : head + 1]
            shares = torch.cat([scores, sink]).softmax(0)[: len(scores)]
            out[position, head] = shares @ v[seen, shared]
    return out.flatten(1)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("lengths", [(5,), (3, 4, 5), (1, 1), (20, 1, 1, 1, 2)])
def test_packed_attention_sees_its_own_segment_only(
    lengths: tuple[int, ...], window: int | None, has_sinks: bool
):
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), 1)
    q, k, v = (
        torch.randn(*shape, heads, SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    packing = Packing.of(lengths, torch.device("cpu"))
    assert (packing.keys.padded_S is None) == (len(lengths) == 5), "both paths must be covered"
    drawn = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    sinks = torch.nn.Parameter(drawn) if has_sinks else None
    out = attention(window, sinks)(q, k, v, packed_seq_params=packing)
    parts = zip(*(x[:, 0].split(lengths) for x in (q, k, v)), strict=True)
    expected = torch.cat([slow_attention(*part, window, sinks) for part in parts])[:, None]
    torch.testing.assert_close(out, expected)
    probe = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    got = torch.autograd.grad((out * probe).sum(), inputs)
    wanted = torch.autograd.grad((expected * probe).sum(), inputs)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_positions_restart_in_every_segment():
    packing = Packing.of((3, 1, 2), torch.device("cpu"))
    assert packing.positions_s.tolist() == [0, 1, 2, 0, 0, 1]


LENGTHS, HEAD_DIM = (5, 3, 9), 16


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_of_a_head_turns_as_in_transformers(share: float, interleaved: bool):
    config_class: Any
    modeling: Any
    config_class, modeling = (
        (Glm4Config, modeling_glm4) if interleaved else (Phi3Config, modeling_phi3)
    )
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    config = config_class(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        pad_token_id=None,
        rope_parameters=parameters,
    )
    rotary = getattr(modeling, "Glm4RotaryEmbedding" if interleaved else "Phi3RotaryEmbedding")
    table = rotary(config)
    rope = Rope(1e4, share=share, interleaved=interleaved)
    frequencies = rotary_frequencies(rope, HEAD_DIM, torch.device("cpu"))
    assert torch.equal(frequencies, table.inv_freq)
    ours = PackedRotary(
        HEAD_DIM,
        rotary_percent=share,
        rotary_interleaved=interleaved,
        use_cpu_initialization=True,
    )
    ours.inv_freq = frequencies
    packing = Packing.of(LENGTHS, torch.device("cpu"))
    q = torch.randn(sum(LENGTHS), 4, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    assert packing.positions_s is not None
    cos, sin = table(q, packing.positions_s[None])
    wanted, _ = modeling.apply_rotary_pos_emb(*2 * (q[None].transpose(1, 2),), cos, sin)
    angles = ours(packing)
    assert angles.shape == (sum(LENGTHS), 1, 1, int(HEAD_DIM * share))
    turned = _apply_rotary_pos_emb_bshd(q[:, None], angles, rotary_interleaved=interleaved)
    torch.testing.assert_close(turned[:, 0], wanted[0].transpose(0, 1), rtol=0, atol=1e-6)
