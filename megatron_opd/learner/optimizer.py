"""Builds AdamW with float32 main parameters, sharded over data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from megatron_opd.config.learner import OptimizerConfig
from megatron_opd.learner.lm_head import head_weight
from megatron_opd.learner.overrides import build, check_overrides


def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], dtype: torch.dtype
) -> MegatronOptimizer:
    """Build Megatron's DistributedOptimizer; one-dimensional parameters get no weight decay."""
    overlap = chunks[0].ddp_config.overlap_param_gather
    return get_megatron_optimizer(optimizer_config(config, dtype, overlap), list(chunks))


def optimizer_config(
    config: OptimizerConfig, dtype: torch.dtype, overlap_param_gather: bool
) -> MegatronOptimizerConfig:
    """Make Megatron's optimizer settings.

    ValueError: the section has a key that is neither ours nor Megatron's, or Megatron refuses it.
    """
    section = "learner.optimizer"
    ours = OptimizerConfig.model_fields
    values = check_overrides(section, MegatronOptimizerConfig, config.megatron, ours) | {
        "optimizer": "adam",
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.beta1,
        "adam_beta2": config.beta2,
        "adam_eps": config.eps,
        # An infinite threshold never clips, but the norm is still computed and reported.
        "clip_grad": config.clip_grad or math.inf,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": True,
        "overlap_param_gather": overlap_param_gather,
    }
    if values.get("optimizer_cpu_offload") and dtype == torch.float32:
        raise ValueError(
            f"{section}.optimizer_cpu_offload must be false with learner.dtype float32, of whose "
            "weights Megatron-Core 0.19.2 cannot build that optimizer, got true; use bfloat16"
        )
    return build(section, MegatronOptimizerConfig, values)


def connect_pipeline_schedule(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Tell Megatron's pipeline schedule how gradients are finalised, and when they may be sent."""
    settings: Any = chunks[0].config
    settings.finalize_model_grads_func = finalize_model_grads
    settings.grad_scale_func = optimizer.scale_loss
    for chunk in chunks:
        model: Any = chunk.module
        looked_up = model.share_embeddings_and_output_weights and model.pre_process
        if chunk.ddp_config.overlap_grad_reduce and model.post_process and not looked_up:
            head_weight(model).signals_main_grad = True  # type: ignore[attr-defined]  # losses/lean.py
    # Without it overlap_grad_reduce would send after every micro-batch.
    waits = [chunk.no_sync for chunk in chunks]
    settings.no_sync_func = waits if len(waits) > 1 else waits[0]


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
