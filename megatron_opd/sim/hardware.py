"""Predicts what the parts of a run cost from the models' sizes, the layout and a GPU's data sheet.

A first guess, to compare settings with: the counts and the assumed shares of the data sheet are
those of the roofline (sizing/roofline.py), whose terms are added up here, since the simulator's
costs are linear in what is asked of a part. Decoding is bound by memory bandwidth, prefill,
scoring and training by compute, a weight sync by the network. The shares are the least certain
numbers: costs measured on the machine at hand (simulation.costs) are better.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.config.schema import Config
from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.simulation import Gpu
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sim.bubbles import bubble_factor
from megatron_opd.sim.costs import Costs, EngineCost, LearnerCost, ScoreCost, SyncCost
from megatron_opd.sizing.exchanges import pass_exchanges, replica_shapes
from megatron_opd.sizing.gpus import ASSUMED, CATALOGUE, GB, Efficiencies, Hardware
from megatron_opd.sizing.recompute import recomputed_elements
from megatron_opd.sizing.roofline import (
    exchange_seconds,
    forward_token_flops,
    optimizer_work,
    phase_time,
    server_exchanges,
)
from megatron_opd.sizing.served import Sized
from megatron_opd.sizing.servers import server_memory
from megatron_opd.sizing.settings import Settings
from megatron_opd.weight_sync.sizes import SyncSizes, sync_sizes

REQUEST_S = 1e-3
"""Seconds of a request besides: HTTP, queues."""
SYNC_S = 0.1
"""Seconds of a weight sync besides: pausing, its handshakes, continuing."""
NETWORK_S = 2e-4
"""Seconds from the controller to a server."""


def default_costs(
    config: Config, student: ModelSpec, teachers: dict[str, Sized], gpu: Gpu
) -> Costs:
    """Predict the costs of a run on one kind of GPU. teachers: by name.

    ValueError: there is no plan for the weight sync.
    """
    hardware = CATALOGUE[gpu]
    sections = config.all_teachers
    return Costs(
        engine=engine_cost(student, config.student, hardware),
        teachers={
            name: score_cost(model, sections[name], hardware) for name, model in teachers.items()
        },
        learner=learner_cost(student, config, hardware),
        sync=sync_cost(student, config, hardware),
        network_s=NETWORK_S,
    )


def engine_cost(
    spec: ModelSpec, section: ServerConfig, hardware: Hardware, assumed: Efficiencies = ASSUMED
) -> EngineCost:
    """Predict a student server's costs. A step reads all weights: its batch meets every expert."""
    sized = section
    if section.gpu_memory_gib is None:
        sized = section.model_copy(update={"gpu_memory_gib": hardware.memory_gib})
    memory = server_memory(spec, sized)
    bandwidth = hardware.hbm_gbs * GB * assumed.hbm
    flops = forward_token_flops(spec)
    peak = section.tp * hardware.tflops * 1e12
    calls_s, row_s = _row_seconds(spec, section, hardware, assumed)
    return EngineCost(
        step_s=assumed.decode_step_s + memory.weights / bandwidth + calls_s,
        step_request_s=flops / (peak * assumed.decode_mfu) + row_s,
        step_cached_token_s=memory.kv_token_bytes / bandwidth,
        prefill_token_s=flops / (peak * assumed.prefill_mfu) + row_s,
        request_s=REQUEST_S,
        max_running=section.max_running_requests,
        cache_tokens=max(1, memory.kv_tokens or 1),
    )


def _row_seconds(
    model: Sized, section: ServerConfig, hardware: Hardware, assumed: Efficiencies
) -> tuple[float, float]:
    """Return the seconds of a pass's exchanges, and those of each token in it."""
    calls_s = sum(exchange_seconds(server_exchanges(model, section, 0, 0), hardware, assumed))
    row_s = sum(exchange_seconds(server_exchanges(model, section, 1, 1), hardware, assumed))
    return calls_s, row_s - calls_s


def score_cost(
    model: Sized, section: ServerConfig, hardware: Hardware, assumed: Efficiencies = ASSUMED
) -> ScoreCost:
    """Predict a teacher server's costs."""
    peak = section.tp * hardware.tflops * 1e12
    calls_s, row_s = _row_seconds(model, section, hardware, assumed)
    return ScoreCost(
        pass_s=calls_s,
        request_s=REQUEST_S,
        token_s=forward_token_flops(model) / (peak * assumed.prefill_mfu) + row_s,
        max_running=section.max_running_requests,
    )


def learner_cost(
    spec: ModelSpec, config: Config, hardware: Hardware, assumed: Efficiencies = ASSUMED
) -> LearnerCost:
    """Predict the learner's costs: a forward pass, and a backward pass that takes twice as long.

    Exchanges within layers and the pipeline's bubbles come on top. So does the share of a forward
    pass that is recomputed, and, where the loss needs the log-probs of the batch's start, a forward
    pass over every mini-batch but the first.
    """
    parallel = config.learner.parallel
    settings = Settings.of(config.learner)
    minis = config.learner.num_mini_batches
    start = start_passes(config)
    again = 2.0 * recomputed_elements(spec, settings) / forward_token_flops(spec)
    passes, pair_passes = 3 + again + start, 3 + (settings.recompute == "full") + start
    replica = parallel.world_size // parallel.dp
    rate = replica * hardware.tflops * 1e12 * assumed.train_mfu
    pair_flops = 2.0 * spec.attention_layers * spec.num_heads * spec.pair_features
    step = phase_time(optimizer_work(spec, config.learner), hardware, 1.0, assumed)
    tokens = config.learner.max_tokens_per_microbatch * parallel.cp
    shapes = replica_shapes(spec, parallel, tokens)
    forward = pass_exchanges(shapes, backward=False)
    sent = [each.times(1 + again + start) for each in forward]
    sent += pass_exchanges(shapes, backward=True)
    sent_s = sum(exchange_seconds(sent, hardware, assumed)) / tokens
    bubbles = bubble_factor(config)
    return LearnerCost(
        update_s=minis * step.seconds,
        token_s=bubbles * (passes * forward_token_flops(spec) / rate + sent_s),
        token_context_s=bubbles * pair_passes * pair_flops / rate,
        ranks=parallel.dp,
    )


def start_passes(config: Config) -> float:
    """Return the forward passes over a mini-batch that its loss needs of the batch's start."""
    minis = config.learner.num_mini_batches
    return config.estimator.applied_correction.prox * (minis - 1) / minis


def sync_cost(spec: ModelSpec, config: Config, hardware: Hardware) -> SyncCost:
    """Predict a weight sync. ValueError: it has no plan."""
    return sync_cost_of(sync_sizes(config, spec), config.weight_sync, hardware)


def least_sync_cost(spec: ModelSpec, config: Config, hardware: Hardware) -> SyncCost:
    """Return what no weight sync to servers of this size takes less than, whoever sends.

    A rank receives its share of the weights over one link; learner and number of servers add to it.
    """
    alone = config.model_copy(
        update={
            "learner": config.learner.model_copy(update={"parallel": ParallelConfig()}),
            "student": config.student.model_copy(update={"servers": 1}),
        }
    )
    sizes = replace(sync_sizes(alone, spec), sent=[0], passed_on=[0], delay=0, copied=0)
    return sync_cost_of(sizes, config.weight_sync, hardware)


def sync_cost_of(sizes: SyncSizes, settings: WeightSyncConfig, hardware: Hardware) -> SyncCost:
    """Predict by the plan for type shards, else that one rank sends everything.

    Staged weights are copied in the pause; with overlap the learner is held while it copies its
    own.
    """
    links = hardware.network_gbs * ASSUMED.link
    received = max(sizes.received)
    copy_gbs = hardware.hbm_gbs * ASSUMED.hbm / 2  # read and written
    if settings.type == "shards":
        seconds = sizes.seconds(links)
    else:
        seconds = sum(sizes.received) / (links * GB)
    paused_s = seconds
    if settings.staging:
        staged = sizes.shadow / received
        paused_s = seconds * (1 - staged) + sizes.shadow / (copy_gbs * GB)
    sync_s = SYNC_S + max(seconds, paused_s)
    held_s = min(sync_s, sizes.copied / (copy_gbs * GB)) if settings.overlap else None
    return SyncCost(
        sync_s=sync_s, paused_s=min(sync_s, SYNC_S + paused_s), held_s=held_s, num_bytes=received
    )
