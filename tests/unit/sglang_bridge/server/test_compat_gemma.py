import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from sglang_bridge.server.compat import gemma
from sglang_bridge.server.entry import offer_standins

offer_standins()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_scaled_as_transformers_scales_them(dtype: torch.dtype):
    from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding

    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=1152, intermediate_size=8, num_hidden_layers=1
    )
    theirs = AutoModelForCausalLM.from_config(config, dtype=dtype).get_input_embeddings()
    ours = Gemma3TextScaledWordEmbedding(64, 1152, 0, embed_scale=1152**0.5).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    ids = torch.arange(64)
    if dtype == torch.bfloat16:
        assert not torch.equal(ours(ids), theirs(ids)), "what the rounding mends"
    gemma.round_scales(torch.nn.ModuleList([ours]))
    assert torch.equal(ours(ids), theirs(ids))
