"""Builds a Megatron-Core GPTModel in this rank's chunks, each wrapped for data parallelism.

Its weights mean nothing until checkpoint.convert fills every one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from shutil import which
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_opd.config.kernels import Kernels
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.recompute import FEED_FORWARD
from megatron_opd.config.speedups import choose_speedups, overlapping
from megatron_opd.learner.attention import (
    PackedRotary,
)
from megatron_opd.learner.delta_net import delta_net_fields, require_kernels
from megatron_opd.learner.gated import gelu, keep_less
from megatron_opd.learner.layers import (
    layer_spec,
    norm_class,
    scale_embedding,
    softmax_scale,
    turn,
)
from megatron_opd.learner.lm_head import hide_padded_ids
from megatron_opd.learner.mla import latent_fields, place_rotary
from megatron_opd.learner.overrides import build, check_overrides
from megatron_opd.learner.top_k import sort_choices
from megatron_opd.learner.world import World
from megatron_opd.models.families.family import EXPERT_BIAS
from megatron_opd.models.spec import ModelSpec

COMPILED = frozenset({"layernorm", "moe_act", "mla_up_proj"})
"""Values of recompute_modules for which Megatron-Core 0.19 compiles an extension."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _is_news(record: logging.LogRecord) -> bool:
    """Drop what Megatron says at every start: that GPTModel ends, that DDP lays out buffers."""
    known = ("GPTModel IS DEPRECATED", "full_param_layout not provided")
    return not any(words in record.getMessage() for words in known)


for _name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{_name}").addFilter(_is_news)


def transformer_config(
    spec: ModelSpec, config: LearnerConfig, kernels: Kernels, *, cuda: bool
) -> TransformerConfig:
    """Make Megatron's configuration of `spec` at the parallel layout of `config`.

    ValueError: `learner.megatron` has a field that it must not, or Megatron refuses the whole.
    """
    parallel, dtype = config.parallel, DTYPES[config.dtype]
    target = TransformerConfig if spec.latent is None else MLATransformerConfig
    deterministic = bool(config.megatron.get("deterministic_mode"))
    speedups = choose_speedups(
        config, kernels, cuda=cuda, moe=spec.is_moe, deterministic=deterministic
    )
    defaults: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        # Megatron's default refuses variable lengths, even in a dense model.
        "moe_token_dispatcher_type": "alltoall",
        "bias_activation_fusion": cuda and not spec.family.gelu,
        "gradient_accumulation_fusion": kernels.fused_gradients,
        # Otherwise every layer asks the GPU for every segment's length, twice.
        "apply_rope_fusion": kernels.engine and spec.latent is None,
    }
    if config.recompute == "full":
        defaults |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif config.recompute == "selective":
        defaults |= {"recompute_modules": list(FEED_FORWARD)}
    if parallel.vpp > 1:
        defaults |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if spec.is_moe:
        defaults |= {
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": kernels.engine,
            "moe_permute_fusion": speedups.permute,
        }
    chosen = defaults | check_overrides("learner.megatron", target, config.megatron)
    _check_chosen(spec, config, chosen, engine=kernels.engine)
    fixed = _architecture(spec) | {
        "recompute_granularity": None if config.recompute == "none" else config.recompute,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": chosen["moe_token_dispatcher_type"] != "allgather",
        # Packed micro-batches differ between ranks, and HybridEP wants them equal.
        "moe_hybridep_pad_uneven_dispatch_inputs": True,
        "perform_initialization": True,  # over it every weight is loaded
        "use_cpu_initialization": not cuda,
        "sequence_parallel": parallel.tp > 1,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
    }
    return build("learner.megatron", target, chosen | fixed)


def _check_chosen(
    spec: ModelSpec, config: LearnerConfig, chosen: Mapping[str, Any], *, engine: bool
) -> None:
    """Raise ValueError for a value that Megatron takes and that fails, or does nothing, later."""
    compiled = sorted(COMPILED & set(chosen.get("recompute_modules", ())))
    if compiled and which("ninja") is None:
        raise ValueError(
            f"learner.megatron.recompute_modules has {compiled[0]}, for which Megatron compiles "
            "an extension at the first backward pass: install ninja and a C++ compiler, or leave "
            "it out"
        )
    tuned, dispatcher = "moe_flex_dispatcher_num_sms", chosen["moe_token_dispatcher_type"]
    if tuned in config.megatron and dispatcher != "flex":
        raise ValueError(
            f"learner.megatron.{tuned} has no effect unless moe_token_dispatcher_type is flex, "
            f"got {dispatcher}; leave it out"
        )
    if spec.delta_net is not None and chosen.get("deterministic_mode"):
        raise ValueError(
            "learner.megatron.deterministic_mode must be false for a model with gated delta nets, "
            "of which Megatron has no deterministic kernel for packed samples, got true"
        )
    if spec.family.expert_biases and chosen.get("bias_dropout_fusion"):
        raise ValueError(
            "learner.megatron.bias_dropout_fusion must be false for experts with biases, which "
            "Megatron-Core 0.19.2 does not fuse, got true; leave it out"
        )
    if spec.family.expert_biases and engine and not chosen["moe_grouped_gemm"]:
        raise ValueError(
            "learner.megatron.moe_grouped_gemm must be true for experts with biases on GPUs, whose "
            "outputs Megatron-Core 0.19.2 otherwise changes in place, got false; leave it out"
        )
    vpp, pp = config.parallel.vpp, config.parallel.pp
    if vpp > 1 and pp == 2 and not chosen["overlap_p2p_comm"]:
        raise ValueError(
            "learner.megatron.overlap_p2p_comm must be true with learner.parallel.vpp above 1 and "
            "pp 2, or the two stages swap activations and gradients; leave it out"
        )


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    """Return what config.json says, in Megatron's words."""
    moe: dict[str, Any] = {}
    if spec.is_moe:
        moe = {
            "num_moe_experts": spec.num_experts,
            "moe_ffn_hidden_size": spec.expert_ffn_size,
            "moe_router_topk": spec.experts_per_token,
            "moe_shared_expert_intermediate_size": spec.shared_ffn_size or None,
            "moe_shared_expert_gate": spec.family.shared_gate,
            "moe_layer_freq": [int(holds) for holds in spec.moe_layers],
            # Softmax over the chosen experts equals renormalising a softmax over all of them.
            "moe_router_pre_softmax": not spec.norm_topk_prob,
            "moe_router_topk_scaling_factor": None if spec.routed_scale == 1 else spec.routed_scale,
        }
    if spec.is_moe and spec.family.sigmoid_router:
        groups, chosen = spec.expert_groups or (None, None)
        moe |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # it is of the checkpoint, and stays so
            "moe_router_num_groups": groups,
            "moe_router_group_topk": chosen,
        }
    found = moe | {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "qk_layernorm": spec.family.qk_norm,
        "add_qkv_bias": spec.family.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": gelu if spec.family.gelu else F.silu,
        "add_bias_linear": spec.family.expert_biases,
        "softmax_type": "learnable" if spec.family.sinks else "vanilla",
        "rotary_interleaved": spec.rope.interleaved,
        "softmax_scale": softmax_scale(spec, spec.rope),
        "window_size": None if spec.window is None else (spec.window - 1, 0),
        "no_rope_freq": [int(unturned) for unturned in spec.unturned] or None,
        "window_attn_skip_freq": [int(windowed) for windowed in spec.windowed] or None,
        "layernorm_zero_centered_gamma": spec.family.zero_centred_norms,
        "attention_output_gate": spec.family.output_gate,
    }
    if spec.gate_limit is not None:
        found |= {
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": spec.gate_limit,
        }
    if spec.delta_net is not None:
        found |= delta_net_fields(spec.delta_net)
    return found if spec.latent is None else found | latent_fields(spec.latent, spec.rope)


def _layer_specs(
    spec: ModelSpec, config: TransformerConfig, engine: bool, vp_stage: int | None
) -> list[ModuleSpec]:
    """Return the layers of one chunk of this pipeline stage."""
    first = get_transformer_layer_offset(config, vp_stage)
    count = get_num_layers_to_build(config, vp_stage)
    kinds: dict[tuple[bool, bool, bool], ModuleSpec] = {}
    layers: list[ModuleSpec] = []
    for layer in range(first, first + count):
        kind = spec.moe_layers[layer], spec.is_windowed(layer), spec.has_delta_net(layer)
        if kind not in kinds:
            moe, windowed, delta = kind
            kinds[kind] = layer_spec(spec, config, engine, moe=moe, windowed=windowed, delta=delta)
        layers.append(kinds[kind])
    return layers


def ddp_config(config: LearnerConfig, *, cuda: bool) -> DistributedDataParallelConfig:
    """Make Megatron's data-parallel settings. ValueError: `learner.ddp` has a field it must not."""
    target = DistributedDataParallelConfig
    chosen = {"grad_reduce_in_fp32": True} | overlapping(config, cuda=cuda)
    chosen |= check_overrides("learner.ddp", target, config.ddp)
    return build("learner.ddp", target, chosen | {"use_distributed_optimizer": True})


def build_model(
    spec: ModelSpec, world: World, config: LearnerConfig
) -> list[DistributedDataParallel]:
    """Build this rank's part of the model: vpp chunks. ValueError: see transformer_config."""
    cuda = world.device.type == "cuda"
    megatron = transformer_config(spec, config, world.kernels, cuda=cuda)
    if megatron.gradient_accumulation_fusion and not world.kernels.fused_gradients:
        raise ValueError(
            "learner.megatron.gradient_accumulation_fusion must be false without "
            "TransformerEngine or apex's fused_weight_gradient_mlp_cuda, whose kernels it uses, "
            "got true; leave it out"
        )
    if world.kernels.engine and spec.window is not None and world.parallel.cp > 1:
        raise ValueError(
            "learner.parallel.cp must be 1 for a model with windows on GPUs, as no test here has "
            f"run TransformerEngine's context parallelism with them, got {world.parallel.cp}; use "
            "learner.parallel.tp or pp"
        )
    if spec.delta_net is not None:
        require_kernels()
    ddp = ddp_config(config, cuda=cuda)
    vpp = world.parallel.vpp
    chunks = [
        _chunk(spec, world, megatron, index if vpp > 1 else None, index) for index in range(vpp)
    ]
    return [
        # Later chunks' gradients are ready first: only the first chunk's come one bucket at a time.
        DistributedDataParallel(megatron, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def _chunk(
    spec: ModelSpec, world: World, config: TransformerConfig, vp_stage: int | None, index: int
) -> GPTModel:
    engine = world.kernels.engine
    layers: Any = TransformerBlockSubmodules(
        layer_specs=_layer_specs(spec, config, engine, vp_stage), layer_norm=norm_class(engine)
    )
    model = _built_without_apex(
        lambda: GPTModel(
            config,
            layers,
            vocab_size=spec.padded_vocab(world.parallel.tp),
            max_sequence_length=spec.max_position,
            position_embedding_type="rope",
            rotary_percent=spec.rope.share,
            rotary_base=spec.rope.theta,  # type: ignore[arg-type]
            share_embeddings_and_output_weights=spec.tied,
            parallel_output=True,
            pre_process=world.pp_rank == 0 and index == 0,
            post_process=world.last_stage and index == world.parallel.vpp - 1,
            vp_stage=vp_stage,
        )
    )
    if not engine or spec.family.gelu:  # for which Megatron has no kernel
        keep_less(model)
    if spec.latent is not None:
        place_rotary(model, spec, world.device, engine=engine)
    else:
        _place_rotary(model, spec, config, world)
    if spec.family.scaled_embedding:
        scale_embedding(model, spec)
    hide_padded_ids(model, spec.num_ids)
    sort_choices(model)
    model.to(world.device, config.params_dtype)
    for parameter in model.parameters():
        # Megatron would add up the gradients of different experts' biases over ranks
        if not getattr(parameter, "allreduce", True):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
    for name, held in model.named_buffers():
        if name.endswith(EXPERT_BIAS):
            held.data = held.data.float()
    return model


def _place_rotary(
    model: GPTModel, spec: ModelSpec, config: TransformerConfig, world: World
) -> None:
    """Give the model its rotary positions."""
    if not world.kernels.engine:
        model.rotary_pos_emb = PackedRotary(
            spec.head_dim,
            rotary_percent=spec.rope.share,
            rotary_interleaved=spec.rope.interleaved,
            rotary_base=spec.rope.theta,  # type: ignore[arg-type]
            use_cpu_initialization=config.use_cpu_initialization,
        )
    turn(model, spec, world.device)


def _built_without_apex(make: Callable[[], GPTModel]) -> GPTModel:
    """Return make(), whose weight gradients TransformerEngine adds in place, without apex.

    Megatron's switch `gradient_accumulation_fusion` is one for all layers, and its own linear
    layers refuse it without apex's kernel. Beside TransformerEngine's layers the LM head alone is
    such a layer: it is let through and keeps its ordinary gradient. The lean log-prob operation
    adds to `main_grad` by itself (losses/lean.py).
    """
    kernel = parallel_layers._grad_accum_fusion_available  # pyright: ignore[reportPrivateUsage]
    parallel_layers._grad_accum_fusion_available = True  # pyright: ignore[reportPrivateUsage]
    try:
        model = make()
    finally:
        parallel_layers._grad_accum_fusion_available = kernel  # pyright: ignore[reportPrivateUsage]
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gradient_accumulation_fusion = module.gradient_accumulation_fusion and kernel
    return model
