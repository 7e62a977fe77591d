"""Plans the memory of a learner rank, stage by stage, and says what to change when it is too much.

Weights and gradients lie in Megatron's buffers: an activation-dtype weight and a float32 gradient
for each parameter of the rank. The distributed optimizer adds, for its share of them, two float32
moments, and a float32 main parameter where the weight is not one itself: dense parameters are
shared among dp * cp ranks, experts among the expert-data-parallel ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.recompute import Recompute, unrefined
from megatron_opd.config.sources import TeacherSource
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sizing.activations import (
    BYTES,
    Shapes,
    TransformerImpl,
    boundary_bytes,
    head_bytes,
    layer_bytes,
)
from megatron_opd.sizing.layout import expert_data_parallel, in_flight_chunks, stage_layers
from megatron_opd.sizing.parameters import Parameters, rank_parameters
from megatron_opd.sizing.recompute import kept_bytes
from megatron_opd.sizing.settings import Settings

GIB = 2**30

# Share of the stated GPU memory to plan with. The rest is left to the CUDA context, NCCL's buffers,
# gaps between blocks, and experts that are not evenly loaded.
USABLE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Counts the bytes of one rank of a pipeline stage.

    activations: those of the micro-batches in flight. working: what is alive for one layer at a
    time (its gradients, or its recomputation) and, on the last stage, the LM head.
    """

    stage: int
    num_layers: int
    parameters: Parameters
    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """Returns the sum of all terms."""
        return sum(self.terms.values())

    @property
    def terms(self) -> dict[str, int]:
        """Returns the bytes by what they hold."""
        names = [field.name for field in fields(self)][3:]
        return {name: getattr(self, name) for name in names}


def microbatch_tokens(config: LearnerConfig, longest_sample: int) -> int:
    """Count the tokens of the largest micro-batch on one context-parallel rank.

    longest_sample: prompt and response; a sample beyond the budget gets a micro-batch of its own.
    """
    return -(-max(config.max_tokens_per_microbatch, longest_sample) // config.parallel.cp)


def learner_memory(
    spec: ModelSpec,
    config: LearnerConfig,
    longest_sample: int,
    kernels: TransformerImpl = "transformer_engine",
) -> list[StageMemory]:
    """Plan by pipeline stage, at its peak, with as many micro-batches as stages or more."""
    parallel = config.parallel
    tokens = microbatch_tokens(config, longest_sample)
    shapes = Shapes(spec, parallel, tokens, BYTES[config.dtype], kernels)
    return [_stage(shapes, config, stage) for stage in range(parallel.pp)]


def _stage(shapes: Shapes, config: LearnerConfig, stage: int) -> StageMemory:
    parallel, settings = config.parallel, Settings.of(config)
    chunks = stage_layers(shapes.spec, parallel, config.megatron)[stage]
    held = rank_parameters(shapes.spec, parallel, stage, chunks)
    layers = [layer for chunk in chunks for layer in chunk]
    whole = [layer_bytes(shapes, layer) for layer in layers]
    boundary = boundary_bytes(shapes)
    kept = sum(kept_bytes(shapes, layer, settings) for layer in layers)
    in_flight = in_flight_chunks(parallel, stage) / parallel.vpp
    if parallel.pp > 1:
        kept += boundary * parallel.vpp  # the outputs sent on, until their gradients come
    working = max(whole, default=0)
    if stage == parallel.pp - 1:
        # the head's backward pass is over before the layers' begins
        working = max(working, head_bytes(shapes, config.logp))
    return StageMemory(
        stage=stage,
        num_layers=len(layers),
        parameters=held,
        weights=held.total * shapes.element_bytes,
        gradients=held.total * settings.gradient_bytes,
        optimizer=optimizer_bytes(held, config),
        activations=int(kept * in_flight),
        working=int(working),
    )


def weight_bytes(spec: ModelSpec, config: LearnerConfig) -> int:
    """Count the bytes of the weights of the rank that holds most, in learner.dtype."""
    return most_weights(spec, config) * BYTES[config.dtype]


def most_weights(spec: ModelSpec, config: LearnerConfig) -> int:
    """Count the weights of the rank that holds most."""
    parallel = config.parallel
    stages = enumerate(stage_layers(spec, parallel, config.megatron))
    return max(rank_parameters(spec, parallel, stage, chunks).total for stage, chunks in stages)


def follower_bytes(spec: ModelSpec, config: LearnerConfig, source: TeacherSource) -> int:
    """Count what that rank keeps for a teacher that follows: an average, a copy, both or neither.

    Averages and copies of them are float32, copies of weights in learner.dtype.
    """
    each = BYTES["float32"] if source.keeps_average else BYTES[config.dtype]
    return (source.keeps_average + source.keeps_copy) * each * most_weights(spec, config)


def optimizer_bytes(held: Parameters, config: LearnerConfig) -> int:
    """Count main parameters (of 16-bit weights) and two moments of this rank's GPU share."""
    parallel, settings = config.parallel, Settings.of(config)
    share = math.ceil(held.dense / (parallel.dp * parallel.cp))
    share += math.ceil(held.expert / expert_data_parallel(parallel))
    each = settings.main_bytes + settings.moment_bytes
    return int(each * share * (1 - settings.offloaded))


def worst_stage(stages: list[StageMemory]) -> StageMemory:
    """Return the stage that needs most."""
    return max(stages, key=lambda stage: stage.total)


def usable_bytes(gpu_memory_gib: float) -> int:
    """Return what a rank may plan to use of a GPU of this size."""
    return int(gpu_memory_gib * GIB * USABLE_SHARE)


def refusal(spec: ModelSpec, config: LearnerConfig, longest_sample: int) -> str | None:
    """Return one line with a remedy when a rank cannot fit learner.gpu_memory_gib; else None."""
    if config.gpu_memory_gib is None:
        return None
    worst = worst_stage(learner_memory(spec, config, longest_sample))
    limit = usable_bytes(config.gpu_memory_gib)
    if worst.total <= limit:
        return None
    largest = sorted(worst.terms.items(), key=lambda term: -term[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    return (
        f"learner.gpu_memory_gib must hold a rank in {USABLE_SHARE:.0%} of it, got "
        f"{config.gpu_memory_gib:g} for {worst.total / GIB:.1f} GiB needed by pipeline stage "
        f"{worst.stage} ({parts}); {_remedy(spec, config, longest_sample, limit)}"
    )


def _remedy(spec: ModelSpec, config: LearnerConfig, longest_sample: int, limit: int) -> str:
    """Return the cheapest single change that fits; otherwise the one nearest to fitting."""
    tried: list[tuple[int, str]] = []
    for change, candidate in _candidates(spec, config, longest_sample):
        total = worst_stage(learner_memory(spec, candidate, longest_sample)).total
        ranks = candidate.parallel.world_size
        if ranks != config.parallel.world_size:
            change = f"{change} ({ranks} ranks)"
        if total <= limit:
            return f"{change} would fit, at {total / GIB:.1f} GiB"
        tried.append((total, change))
    if not tried:
        return "no layout of this model needs less"
    total, change = min(tried)
    return f"no single change is enough; nearest is {change}, at {total / GIB:.1f} GiB"


def _candidates(
    spec: ModelSpec, config: LearnerConfig, longest_sample: int
) -> Iterator[tuple[str, LearnerConfig]]:
    """Yield changes that keep the batch as it is: cheapest first, more ranks last."""
    parallel = config.parallel
    more: dict[Recompute, tuple[Recompute, ...]] = {"none": ("selective", "full"), "full": ()}
    for recompute in more.get(config.recompute, ("full",)):
        change = {"recompute": recompute, "megatron": unrefined(config.megatron)}
        yield f"learner.recompute={recompute}", config.model_copy(update=change)
    tokens = max(config.max_tokens_per_microbatch // 2, longest_sample)
    if tokens < config.max_tokens_per_microbatch:
        change = {
            "max_tokens_per_microbatch": tokens,
            "recompute": "full",
            "megatron": unrefined(config.megatron),
        }
        yield (
            f"learner.max_tokens_per_microbatch={tokens} with learner.recompute=full",
            config.model_copy(update=change),
        )
    for name in ("ep", "tp", "pp", "dp"):
        value = getattr(parallel, name) * 2
        tree = parallel.model_dump() | {name: value}
        try:
            larger = type(parallel).model_validate(tree)
            spec.check_parallel(larger, uneven=config.uneven_stages)
        except ValueError:
            continue  # the model or the ranks cannot be cut so
        yield f"learner.parallel.{name}={value}", config.model_copy(update={"parallel": larger})
