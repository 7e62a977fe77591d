"""Builds Megatron's multi-head latent attention for packed sequences.

Invariant: what a rank holds does not depend on the kernels. TransformerEngine's layers have the
matrices that make latents whole on every tensor-parallel rank, Megatron's local ones would cut
them; here every rank has them whole, and the rows of the others are those of its heads.

Norms of latents take rms_norm_eps, as SGLang's do; transformers takes 1e-6 whatever it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_opd.learner.attention import (
    PackedAttention,
    PackedRotary,
    Packing,
    RMSNorm,
    rotary_frequencies,
)
from megatron_opd.models.latent import Latent
from megatron_opd.models.rope import Rope
from megatron_opd.models.spec import ModelSpec

_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")
_GIVEN = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


def latent_fields(latent: Latent, rope: Rope) -> dict[str, Any]:
    """Return what config.json says of latent attention, in Megatron's words.

    Cosines and sines are those of `place_rotary`, with a factor of 1; what YaRN asks for is in the
    softmax alone.
    """
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.turning,
        "v_head_dim": latent.value,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": rope.theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_scaling_factor": rope.factor,
        "mscale": rope.mscale_all_dim,
        "mscale_all_dim": rope.mscale_all_dim,
        "softmax_scale": None,  # it follows from the two above
    }


def latent_layer(num_experts: int | None, *, engine: bool, grouped: bool) -> ModuleSpec:
    """Return one layer with latent attention, of TransformerEngine's modules or of local ones."""
    if engine:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=grouped,
            qk_layernorm=True,
            multi_latent_attention=True,
        )
        spec.submodules.self_attention.module = LatentAttention  # type: ignore[union-attr]
        return spec
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=True,
        multi_latent_attention=True,
        normalization="RMSNorm",
    )
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    # a checkpoint has TransformerEngine's names, whose norms belong to the linear layer after them
    parts.sharded_state_dict_keys_map = {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    } | ({} if num_experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"})
    parts.self_attention.module = LatentAttention
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.kv_layernorm = RMSNorm
    return spec


def place_rotary(model: GPTModel, spec: ModelSpec, device: torch.device, *, engine: bool) -> None:
    """Give every attention the rotary positions of the features that turn."""
    assert spec.latent is not None
    frequencies = rotary_frequencies(spec.rope, spec.latent.turning, device)
    for layer in model.decoder.layers:
        attention: Any = layer.self_attention
        if not engine:
            attention.rotary_pos_emb = LatentRotary(
                spec.latent.turning,
                rotary_percent=1.0,
                rotary_base=spec.rope.theta,  # type: ignore[arg-type]
                use_cpu_initialization=model.config.use_cpu_initialization,
            )
        attention.rotary_pos_emb.inv_freq = frequencies


class LatentRotary(PackedRotary):
    """Computes rotary angles for queries [s, h, d]: Megatron's latent attention drops the batch."""

    def forward(self, packing: Packing, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Return the angles, float32 [s, 1, d]."""
        return super().forward(packing)[:, 0]


class WholeLinear(torch.nn.Module):
    """Multiplies this rank's positions by a matrix that every tensor-parallel rank has whole."""

    def __init__(self, config: MLATransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.zeros(outputs, inputs, dtype=config.params_dtype, device=device)
        )
        # finalize_model_grads sums the gradient over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map [s, 1, inputs] to [s, 1, outputs]; there is no bias."""
        return F.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """Takes norms as its layer says, and holds what makes latents whole on every rank."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name in _DOWN:
            cut = getattr(self, name, None)
            if isinstance(cut, ColumnParallelLinear):
                setattr(self, name, WholeLinear(config, cut.input_size, cut.output_size))

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return what the layer says: Megatron asks for a norm before queries without a latent."""
        return {name: getattr(submodules, name) for name in _GIVEN}
