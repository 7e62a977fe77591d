"""A Megatron-Core GPTModel, wrapped for data parallelism, from a ModelSpec.

Its weights mean nothing until checkpoint.convert fills every one of them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_opd.checkpoint.model_spec import ModelSpec
from megatron_opd.learner.attention import (
    PackedRotary,
    Packing,
    RMSNorm,
    local_layer,
    rotary_frequencies,
)
from megatron_opd.learner.lm_head import hide_padded_ids
from megatron_opd.learner.setup import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def use_transformer_engine(device: torch.device) -> bool:
    """TransformerEngine's kernels where they exist: on a GPU with the package installed."""
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def transformer_config(
    spec: ModelSpec, world: World, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration of `spec` at this rank's parallel layout."""
    parallel, engine = world.parallel, use_transformer_engine(world.device)
    moe: dict[str, Any] = {}
    if spec.is_moe:
        moe = {
            "num_moe_experts": spec.num_experts,
            "moe_ffn_hidden_size": spec.expert_ffn_size,
            "moe_router_topk": spec.experts_per_token,
            "moe_layer_freq": [int(holds) for holds in spec.moe_layers],
            # Softmax over the chosen experts equals renormalising a softmax over all of them.
            "moe_router_pre_softmax": not spec.norm_topk_prob,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": engine,
        }
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.family.qk_norm,
        add_qkv_bias=spec.family.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=world.device.type == "cuda",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # allgather refuses variable lengths, even unused
        variable_seq_lengths=True,
        # Although every weight is loaded over it: without it parameters are not marked as tensor
        # parallel, and gradient norms would count one rank's shards only.
        perform_initialization=True,
        use_cpu_initialization=world.device.type == "cpu",
        gradient_accumulation_fusion=False,
        sequence_parallel=parallel.tp > 1,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=world.parallel.expert_tp,
        **(full | {"recompute_num_layers": 1} if recompute else {}),
        **moe,
    )


def _layer_specs(spec: ModelSpec, config: TransformerConfig, engine: bool) -> list[ModuleSpec]:
    """The layers of this pipeline stage."""
    first = get_transformer_layer_offset(config)
    count = config.num_layers // config.pipeline_model_parallel_size
    kinds = {}
    for holds_experts in set(spec.moe_layers):
        experts = spec.num_experts if holds_experts else None
        kinds[holds_experts] = (
            get_gpt_layer_with_transformer_engine_spec(
                num_experts=experts,
                moe_grouped_gemm=spec.is_moe,
                qk_layernorm=spec.family.qk_norm,
            )
            if engine
            else local_layer(experts, spec.family.qk_norm)
        )
    return [kinds[holds] for holds in spec.moe_layers[first : first + count]]


def build_model(
    spec: ModelSpec, world: World, dtype: torch.dtype, recompute: bool
) -> DistributedDataParallel:
    """This rank's part of the model."""
    engine = use_transformer_engine(world.device)
    config = transformer_config(spec, world, dtype, recompute)
    norm: Any = RMSNorm
    if engine:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    layers: Any = TransformerBlockSubmodules(
        layer_specs=_layer_specs(spec, config, engine), layer_norm=norm
    )
    model = GPTModel(
        config,
        layers,
        vocab_size=spec.padded_vocab(world.parallel.tp),
        max_sequence_length=spec.max_position,
        position_embedding_type="rope",
        rotary_base=spec.rope.theta,  # type: ignore[arg-type]
        share_embeddings_and_output_weights=spec.tied,
        parallel_output=True,
        pre_process=world.pp_rank == 0,
        post_process=world.last_stage,
    )
    if not engine:
        model.rotary_pos_emb = PackedRotary(
            spec.head_dim,
            rotary_percent=1.0,
            rotary_base=spec.rope.theta,  # type: ignore[arg-type]
            use_cpu_initialization=config.use_cpu_initialization,
        )
    model.rotary_pos_emb.inv_freq = rotary_frequencies(spec.rope, spec.head_dim, world.device)
    hide_padded_ids(model, spec.vocab_size)
    model.to(world.device, dtype)
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        model,
    )


def packing_of(lengths: tuple[int, ...], device: torch.device) -> PackedSeqParams:
    """The segments of a micro-batch, in the form the layers of `build_model` want."""
    if not use_transformer_engine(device):
        return Packing.of(lengths, device)
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths).cumsum(0)
    bounds = bounds.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
