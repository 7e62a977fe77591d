"""Predicts what the parts of a run cost from the models' sizes, the layout and a GPU's data sheet.

A first guess, to compare settings with: decoding is bound by memory bandwidth, with the compute of
its requests added; prefill, scoring and training are bound by compute; a weight sync by the
network. The efficiencies are those that well-tuned systems reach on large models, and are the
least certain numbers here: costs measured on the machine at hand (simulation.costs) are better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.config.schema import Config
from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.simulation import Gpu
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sim.costs import Costs, EngineCost, LearnerCost, ScoreCost, SyncCost
from megatron_opd.sim.exchanges import bubble_factor, exchange_seconds
from megatron_opd.sizing.parameters import model_parameters
from megatron_opd.sizing.recompute import recomputed_elements
from megatron_opd.sizing.served import Sized, size_of
from megatron_opd.sizing.servers import server_memory
from megatron_opd.sizing.settings import Settings
from megatron_opd.weight_sync.sizes import SyncSizes, sync_sizes

GB = 1e9


@dataclass(frozen=True, slots=True)
class Hardware:
    """Describes a GPU by its data sheet.

    tflops: dense bfloat16. hbm_gbs: GB/s of its memory. memory_gib: of it. node_gbs, network_gbs:
    GB/s in one direction to GPUs of its node, and of its network card.
    """

    tflops: float
    hbm_gbs: float
    memory_gib: float
    node_gbs: float
    network_gbs: float


# NVIDIA's data sheets: A100 SXM 80 GB, H20, H100 SXM, H200 SXM, and one GPU of an HGX B200. They
# state NVLink in both directions together, and Hopper's and Blackwell's TFLOP/s "with sparsity",
# which is twice the dense figure. Each GPU has a network card: HDR InfiniBand beside an A100, else
# NDR.
CATALOGUE: dict[Gpu, Hardware] = {
    "a100": Hardware(312.0, 2039.0, 80.0, 300.0, 25.0),
    "h20": Hardware(148.0, 4000.0, 96.0, 450.0, 50.0),
    "h100": Hardware(989.5, 3350.0, 80.0, 450.0, 50.0),
    "h200": Hardware(989.5, 4800.0, 141.0, 450.0, 50.0),
    "b200": Hardware(2250.0, 8000.0, 180.0, 900.0, 50.0),
}

HBM_EFFICIENCY = 0.7
"""Share of the memory bandwidth that a decode step reaches."""
DECODE_MFU = 0.5
"""Share of the peak that the matrix products of a large decode batch reach."""
PREFILL_MFU = 0.5
"""Share of the peak that prefill and scoring reach."""
TRAIN_MFU = 0.4
"""Share of the peak that a learner without recomputation reaches, in model FLOPs."""
LINK_EFFICIENCY = 0.8
"""Share of a link's bandwidth that large messages reach."""
STEP_S = 1e-3
"""Seconds of a decode step besides: launches, sampling, the scheduler."""
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


def forward_token_flops(model: Sized) -> float:
    """Count the FLOPs of a forward pass for one token, its head included and attention not."""
    size = size_of(model)
    return 2.0 * (size.active_layer_elements + size.hidden_size * size.vocab_size)


def engine_cost(spec: ModelSpec, section: ServerConfig, hardware: Hardware) -> EngineCost:
    """Predict a student server's costs. A step reads all weights: its batch meets every expert."""
    sized = section
    if section.gpu_memory_gib is None:
        sized = section.model_copy(update={"gpu_memory_gib": hardware.memory_gib})
    memory = server_memory(spec, sized)
    bandwidth = hardware.hbm_gbs * GB * HBM_EFFICIENCY
    flops = forward_token_flops(spec)
    peak = section.tp * hardware.tflops * 1e12
    return EngineCost(
        step_s=STEP_S + memory.weights / bandwidth,
        step_request_s=flops / (peak * DECODE_MFU),
        step_cached_token_s=memory.kv_token_bytes / bandwidth,
        prefill_token_s=flops / (peak * PREFILL_MFU),
        request_s=REQUEST_S,
        max_running=section.max_running_requests,
        cache_tokens=max(1, memory.kv_tokens or 1),
    )


def score_cost(model: Sized, section: ServerConfig, hardware: Hardware) -> ScoreCost:
    """Predict a teacher server's costs."""
    peak = section.tp * hardware.tflops * 1e12
    return ScoreCost(
        request_s=REQUEST_S,
        token_s=forward_token_flops(model) / (peak * PREFILL_MFU),
        max_running=section.max_running_requests,
    )


def learner_cost(spec: ModelSpec, config: Config, hardware: Hardware) -> LearnerCost:
    """Predict the learner's costs: a forward pass, and a backward pass that takes twice as long.

    Exchanges within layers and the pipeline's bubbles come on top (exchanges.py). So does the share
    of a forward pass that is recomputed, and, where the loss needs the log-probs of the batch's
    start, a forward pass over every mini-batch but the first.
    """
    parallel = config.learner.parallel
    settings = Settings.of(config.learner)
    recomputed = 2.0 * recomputed_elements(spec, settings)
    minis = config.learner.num_mini_batches
    passes = 3 + recomputed / forward_token_flops(spec)
    start = config.estimator.applied_correction.prox * (minis - 1) / minis
    passes += start
    pair_passes = 3 + (settings.recompute == "full") + start
    replica = parallel.world_size // parallel.dp
    rate = replica * hardware.tflops * 1e12 * TRAIN_MFU
    pair_flops = 2.0 * spec.attention_layers * spec.num_heads * spec.pair_features
    held = model_parameters(spec).total / replica
    links = hardware.network_gbs * GB * LINK_EFFICIENCY
    # float32 gradients are reduced and bfloat16 weights gathered; the optimizer's share is small
    exchange_s = 6.0 * held / links if parallel.dp > 1 else 0.0
    optimizer_s = 30.0 * held / parallel.dp / (hardware.hbm_gbs * GB * HBM_EFFICIENCY)
    node = hardware.node_gbs * GB * LINK_EFFICIENCY
    # the backward pass, for twice the arithmetic, exchanges as much as a forward pass
    sent_s = (passes - 1) * exchange_seconds(spec, parallel, node, links)
    bubbles = bubble_factor(config)
    return LearnerCost(
        update_s=minis * (exchange_s + optimizer_s),
        token_s=bubbles * (passes * forward_token_flops(spec) / rate + sent_s),
        token_context_s=bubbles * pair_passes * pair_flops / rate,
        ranks=parallel.dp,
    )


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
    links = hardware.network_gbs * LINK_EFFICIENCY
    received = max(sizes.received)
    copy_gbs = hardware.hbm_gbs * HBM_EFFICIENCY / 2  # read and written
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
