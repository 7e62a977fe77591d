"""Says the learning rate of every update: warm-up, then learner.optimizer.lr_scheduler."""

from __future__ import annotations

import math

from megatron_opd.config.learner import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, updates: int) -> float:
    """Return the learning rate of `update` (0-based) out of `updates`.

    Warm-up rises linearly from 0 and reaches the peak at update `warmup_steps`; no update is
    spent at 0. The cosine reaches min_lr at the last update.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / (config.warmup_steps + 1)
    match config.lr_scheduler:
        case "constant":
            return config.lr
        case "cosine":
            span = max(1, updates - 1 - config.warmup_steps)
            progress = min(1.0, (update - config.warmup_steps) / span)
            share = 0.5 * (1 + math.cos(math.pi * progress))
            return config.min_lr + (config.lr - config.min_lr) * share
