"""Predicts what a learner's layout costs beyond its arithmetic: exchanges in layers, and bubbles.

With tensor parallelism each layer gathers and scatters its input twice in a pass, and with more
ranks than key-value heads the queries, keys and values once; context-parallel ranks send each other
keys and values; expert-parallel ones send each token to its experts and back.
None of it is taken to be hidden behind arithmetic. A pipeline of p stages idles for p - 1 of its
micro-batches' times at the ends of each mini-batch (Narayanan et al. 2021, sec. 2.2).
"""

from __future__ import annotations

import math

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec

GPUS_OF_A_NODE = 8
ACTIVATION_BYTES = 2


def exchange_seconds(
    spec: ModelSpec, parallel: ParallelConfig, node_bytes_s: float, network_bytes_s: float
) -> float:
    """Return the seconds of one pass's exchanges for each token of a replica.

    node_bytes_s, network_bytes_s: bytes a second to a GPU of the node, and of another.
    """
    tp, cp, ep = parallel.tp, parallel.cp, parallel.ep

    def link(ranks: int) -> float:
        return node_bytes_s if ranks <= GPUS_OF_A_NODE else network_bytes_s

    hidden = ACTIVATION_BYTES * spec.hidden_size
    keys_and_values = ACTIVATION_BYTES * spec.num_kv_heads * spec.pair_features
    seconds = spec.num_layers * 4 * hidden * (tp - 1) / tp / cp / link(tp)
    seconds += spec.num_layers * keys_and_values / tp * (cp - 1) / cp / link(tp * cp)
    if tp > spec.num_kv_heads:  # every rank gathers the queries, keys and values of all
        heads = spec.num_heads + 2 * spec.num_kv_heads
        gathered = ACTIVATION_BYTES * heads * spec.head_dim
        seconds += spec.num_layers * gathered * (tp - 1) / tp / cp / link(tp)
    sent = sum(spec.moe_layers) * 2 * spec.experts_per_token * hidden * (ep - 1) / ep
    seconds += sent / (tp * cp) / link(ep * parallel.expert_tp)
    return seconds / parallel.pp  # stages work at once


def bubble_factor(config: Config) -> float:
    """Return by how much the pipeline's bubbles lengthen an update: 1 without a pipeline."""
    learner, parallel = config.learner, config.learner.parallel
    lengths = config.simulation.lengths
    mean = (lengths.mean or config.rollout.max_new_tokens / 2) + lengths.prompt_tokens
    # of the rank with most
    samples = math.ceil(config.buffer.batch_size / (learner.num_mini_batches * parallel.dp))
    budget = max(mean, learner.max_tokens_per_microbatch * parallel.cp)
    micros = max(1, math.ceil(samples * mean / budget))
    return 1 + (parallel.pp - 1) / (parallel.vpp * micros)
