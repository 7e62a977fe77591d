"""Predicts how long a pipeline idles."""

from __future__ import annotations

import math

from megatron_opd.config.schema import Config
from megatron_opd.sim.drawn_lengths import drawn_lengths, mean_tokens


def micro_batches(config: Config) -> int:
    """Return the micro-batches of a mini-batch on the data-parallel rank with most samples."""
    learner, parallel = config.learner, config.learner.parallel
    mean = mean_tokens(drawn_lengths(config))
    samples = math.ceil(config.buffer.batch_size / (learner.num_mini_batches * parallel.dp))
    budget = max(mean, learner.max_tokens_per_microbatch * parallel.cp)
    return max(1, math.ceil(samples * mean / budget))


def bubble_factor(config: Config) -> float:
    """Return by how much the pipeline's bubbles lengthen an update: 1 without a pipeline.

    A pipeline of p stages idles for p - 1 of its micro-batches' times at the ends of each
    mini-batch (Narayanan et al. 2021, sec. 2.2).
    """
    parallel = config.learner.parallel
    return 1 + (parallel.pp - 1) / (parallel.vpp * micro_batches(config))
