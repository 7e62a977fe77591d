"""AdamW with float32 main parameters, sharded over data-parallel ranks, and its schedule."""

from __future__ import annotations

import math

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from megatron_opd.config.learner import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, updates: int) -> float:
    """Learning rate of `update` (0-based) out of `updates`.

    Warm-up rises linearly from 0 and reaches the peak at update `warmup_updates`; no update is
    spent at 0. The cosine reaches min_lr at the last update.
    """
    if update < config.warmup_updates:
        return config.lr * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.lr
    span = max(1, updates - 1 - config.warmup_updates)
    progress = min(1.0, (update - config.warmup_updates) / span)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizer(
    config: OptimizerConfig, model: DistributedDataParallel, dtype: torch.dtype
) -> MegatronOptimizer:
    """Megatron's DistributedOptimizer; parameters of one dimension get no weight decay."""
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            # An infinite threshold never clips, but the norm is still computed and reported.
            clip_grad=config.clip_grad or math.inf,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        [model],
    )


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Give every parameter group its rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
