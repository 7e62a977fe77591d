"""Rotary positions of a part of a head, and of neighbours, against transformers' own."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import (
    _apply_rotary_pos_emb_bshd,  # pyright: ignore[reportPrivateUsage]
)
from transformers import Glm4Config, Phi3Config
from transformers.models.glm4 import modeling_glm4
from transformers.models.phi3 import modeling_phi3

from megatron_opd.learner.attention import PackedRotary, Packing, rotary_frequencies
from megatron_opd.models.rope import Rope

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
