"""Lists the sizes, layouts and schedules that a search may choose, and why the others cannot be.

Sizes are powers of two within a node. Of layouts of one number of GPUs the one whose updates take
the fewest seconds is kept: throughput depends on the layout through nothing else but the weight
sync, whose time hardly differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from megatron_opd.config.schedule import ScheduleConfig
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sim.planner.candidates import LearnerSize, ScheduleChoice
from megatron_opd.sizing.layout import stage_layers
from megatron_opd.sizing.learner import GIB, learner_memory, usable_bytes, worst_stage
from megatron_opd.sizing.served import Sized, size_of
from megatron_opd.sizing.servers import refusal, server_memory

LARGEST_CP, LARGEST_EP = 8, 64


@dataclass(slots=True)
class Losers:
    """Counts what was left out before any candidate was made, by class, with one reason of each."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    reasons: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, kind: str, reason: str) -> None:
        """Count one. The reason given first is kept."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.reasons.setdefault(kind, reason)


@dataclass(frozen=True, slots=True)
class Pins:
    """Says which keys of the configuration keep their values. keys: dotted."""

    keys: frozenset[str] = frozenset()

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def of(self, key: str, value: int, others: Sequence[int]) -> Sequence[int]:
        """Return the values to try: the configuration's own if the key is kept."""
        return (value,) if key in self.keys else others


def powers(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [2**i for i in range(max(0, most).bit_length())]


def replicas(samples: int, ranks: int, gpus: int, node: int) -> list[int]:
    """Return the numbers of data-parallel copies, of `ranks` each, that are worth trying.

    Those that fit, in a node or in whole nodes, and of which the one with most of the mini-batch's
    samples has fewer than with fewer copies.
    """
    found: dict[int, int] = {}
    for count in range(1, min(samples, gpus // ranks) + 1):
        if ranks * count <= node or ranks * count % node == 0:
            found.setdefault(-(-samples // count), count)
    return list(found.values())


def layouts(
    config: Config, spec: ModelSpec, pins: Pins, *, gpus: int, node: int
) -> Iterator[ParallelConfig]:
    """Yield the learner's layouts of at most `gpus` ranks: a node's or less, or whole nodes."""
    now, learner = config.learner.parallel, config.learner
    key = "learner.parallel"
    samples = config.buffer.batch_size // learner.num_mini_batches
    for tp in pins.of(f"{key}.tp", now.tp, powers(node)):
        for pp in pins.of(f"{key}.pp", now.pp, powers(spec.num_layers)):
            for cp in pins.of(f"{key}.cp", now.cp, powers(LARGEST_CP)):
                copies = replicas(samples, tp * pp * cp, gpus, node)
                for dp in pins.of(f"{key}.dp", now.dp, copies):
                    ranks = tp * pp * cp * dp
                    if ranks > gpus or samples < dp or (ranks > node and ranks % node):
                        continue
                    experts = powers(min(LARGEST_EP, spec.num_experts)) or [1]
                    for ep in pins.of(f"{key}.ep", now.ep, experts):
                        found = _layout(config, spec, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)
                        if found is not None:
                            yield found


def _layout(config: Config, spec: ModelSpec, **sizes: int) -> ParallelConfig | None:
    """Return a layout; None: model or ranks cannot be cut so."""
    now = config.learner.parallel
    same_experts = sizes["ep"] == now.ep and sizes["tp"] == now.tp
    extra = {
        "etp": now.etp if same_experts else None,
        "vpp": now.vpp if sizes["pp"] == now.pp else 1,
    }
    try:
        found = ParallelConfig.model_validate({**sizes, **extra})
        spec.check_parallel(found, uneven=config.learner.uneven_stages)
    except ValueError:  # pydantic's too
        return None
    # first and last stages of a fixed size fit few numbers of stages
    stages = stage_layers(spec, found, config.learner.megatron)
    held = [layer for chunks in stages for chunk in chunks for layer in chunk]
    return found if sorted(held) == list(range(spec.num_layers)) else None


def learners(
    config: Config,
    spec: ModelSpec,
    found: Iterator[ParallelConfig],
    cost: Callable[[LearnerConfig], LearnerSize],
    update_s: Callable[[LearnerSize], float],
    longest: int,
    memory_gib: float,
    losers: Losers,
) -> tuple[LearnerSize, ...]:
    """Return the fastest layout that fits, of each number of GPUs.

    cost: makes a Learner of a section. update_s: seconds of an average update. longest: tokens of
    the longest sample. memory_gib: of the card.
    """
    best: dict[int, tuple[float, int, LearnerSize]] = {}
    limit = usable_bytes(memory_gib)
    nearest = math.inf
    for parallel in found:
        section = config.learner.model_copy(update={"parallel": parallel})
        worst = worst_stage(learner_memory(spec, section, longest)).total
        if worst > limit:
            nearest = min(nearest, worst)
            kind = "learner layout does not fit"
            losers.add(kind, "")
            losers.reasons[kind] = (
                f"a rank needs {nearest / GIB:.1f} GiB or more of {limit / GIB:.1f} usable"
            )
            continue
        learner = cost(section)
        # of equally fast ones that with more room
        rank = update_s(learner), worst, learner
        before = best.get(learner.gpus)
        if before is not None:
            losers.add(
                "slower learner layout", "another layout of as many GPUs makes faster updates"
            )
        if before is None or rank[:2] < before[:2]:
            best[learner.gpus] = rank
    return tuple(best[gpus][2] for gpus in sorted(best))


def servers(
    key: str,
    section: ServerConfig,
    model: Sized,
    pins: Pins,
    memory_gib: float,
    context: int,
    node: int,
    losers: Losers,
) -> list[ServerConfig]:
    """Return the section with every tp that the model can be cut by, and whose weights fit.

    context: tokens that the KV cache must have room for. ep becomes the largest that divides both
    tp and the configuration's own.
    """
    found: list[ServerConfig] = []
    size = size_of(model)
    for tp in pins.of(f"{key}.tp", section.tp, powers(node)):
        heads = size.num_kv_heads
        if size.num_heads % tp or size.ffn_size % tp or max(tp, heads) % min(tp, heads):
            continue
        ep = math.gcd(section.ep, tp)
        change = {"tp": tp, "ep": ep, "gpus": None, "gpu_memory_gib": memory_gib}
        sized = section.model_copy(update=change)
        if refusal(key, size, sized, context) is not None:
            memory = server_memory(size, sized)
            needed = memory.weights + memory.kv_token_bytes * context
            limit = memory_gib * sized.mem_fraction_static
            losers.add(
                f"{key} server does not fit",
                f"tp {tp}: weights and one longest request take {needed / GIB:.1f} GiB of "
                f"{limit:.1f} usable",
            )
            continue
        found.append(sized)
    return found


def schedules(
    config: Config, pins: Pins, staleness: int, losers: Losers
) -> tuple[tuple[ScheduleChoice, ...], int | None]:
    """Return the schedules of a bound of at most `staleness`, and the least bound of the others."""
    batch = config.buffer.batch_size
    found: dict[ScheduleConfig, ScheduleChoice] = {}
    beyond: list[int] = []
    for tree in _schedule_trees(config, pins, staleness):
        try:
            kind = ScheduleConfig.model_validate(tree)
        except ValidationError:
            continue  # kept keys that contradict this type
        bound = kind.bound(batch)
        if config.run.deterministic and not kind.exact:
            losers.add("schedule", f"run.deterministic excludes type {kind.type}")
        elif bound > staleness:
            beyond.append(bound)
            losers.add("too stale", f"{kind.type}: staleness {bound} > {staleness}")
        else:
            found.setdefault(kind, ScheduleChoice(kind, bound, kind.permits(batch)))
    return tuple(found.values()), min(beyond, default=None)


def _schedule_trees(config: Config, pins: Pins, staleness: int) -> Iterator[Mapping[str, Any]]:
    """Yield the schedules to try, one class of staleness beyond the limit included."""
    now = config.schedule.model_dump()
    kept = {name: now[name] for name in now if f"schedule.{name}" in pins}
    trees: list[dict[str, Any]] = [
        {"type": "sync"},
        {name: now[name] for name in ("type", "max_staleness", "sync_every", "in_flight")},
    ]
    for bound in range(1, staleness + 2):
        trees += [
            {"type": "async", "max_staleness": float(bound)},
            {"type": "step_off", "max_staleness": float(bound)},
            {"type": "stream", "sync_every": bound + 1},
        ]
    if config.run.deterministic or now["type"] == "controlled":
        trees += [
            {"type": "controlled", "max_staleness": float(bound)} for bound in range(staleness + 2)
        ]
    for tree in trees:
        if all(tree.get(name, value) == value for name, value in kept.items()):
            yield {**tree, **kept}
