"""Makes the memory tables of `opd check`: parameters, learner, groups, servers, their turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import get_args

from rich.table import Table

from megatron_opd.config.recompute import Recompute, unrefined
from megatron_opd.config.roles import section_of
from megatron_opd.config.schema import Config
from megatron_opd.inputs.model_facts import ModelFacts, RunModels
from megatron_opd.inputs.models import longest_row, longest_sample
from megatron_opd.launch.gpus import has_gpu
from megatron_opd.output import byte_text, count_text, new_table
from megatron_opd.sizing.activations import TransformerImpl
from megatron_opd.sizing.flops import Work, train_flops
from megatron_opd.sizing.layout import RankGroups, rank_groups
from megatron_opd.sizing.learner import (
    GIB,
    USABLE_SHARE,
    StageMemory,
    learner_memory,
    microbatch_tokens,
    usable_bytes,
    worst_stage,
)
from megatron_opd.sizing.recompute import recomputed_flops
from megatron_opd.sizing.servers import server_memory
from megatron_opd.sizing.settings import Settings, unread
from megatron_opd.sizing.turns import host_bytes, turn_memory

MIB, KIB = 2**20, 2**10
MOST_STAGES = 8
HEADS = {"gradients": "grads", "activations": "activ."}


def memory_tables(config: Config, models: RunModels) -> Iterator[Table]:
    """Yield the tables in the order in which they are printed."""
    student = models.student
    yield _models(models)
    yield _learner(config, student)
    yield _recomputation(config, student)
    groups = rank_groups(config.learner.parallel, student.spec.is_moe)
    if groups:
        yield _groups(groups)
    yield _step(config, student)
    yield _servers(config, models)
    if config.schedule.time_shared and not config.student.urls:
        yield _turns(config, student)


def kernels_here(config: Config) -> TransformerImpl:
    """Return the kernels to count activations for: a stated GPU size means TransformerEngine."""
    if config.learner.gpu_memory_gib is not None:
        return "transformer_engine"
    engine = has_gpu() and find_spec("transformer_engine") is not None
    return "transformer_engine" if engine else "local"


def _models(models: RunModels) -> Table:
    table = new_table("parameters", ("model", "total", "used by a token", "experts", "in bfloat16"))
    for role, facts in models.served.items():
        size = facts.size
        table.add_row(
            role,
            count_text(size.parameters),
            count_text(size.active_parameters),
            f"{size.expert_parameters / size.parameters:.1%}",
            byte_text(size.parameters * 2),
        )
    return table


def _learner(config: Config, student: ModelFacts) -> Table:
    learner = config.learner
    longest, kernels = longest_sample(config, student), kernels_here(config)
    stages = learner_memory(student.spec, learner, longest, kernels)
    worst = worst_stage(stages)
    unit, name = (GIB, "GiB") if worst.total >= GIB else (MIB, "MiB")
    layers = "TransformerEngine" if kernels == "transformer_engine" else "Megatron's local"
    tokens = microbatch_tokens(learner, longest)
    table = new_table(
        f"learner memory, {name} per rank",
        ("stage", "layers", "parameters", *(HEADS.get(t, t) for t in worst.terms), "total"),
    )
    for stage in _shown(stages, worst):
        sizes = [f"{size / unit:.1f}" for size in (*stage.terms.values(), stage.total)]
        mark = "*" if stage is worst and len(stages) > 1 else ""
        row = (f"{stage.stage}{mark}", str(stage.num_layers), count_text(stage.parameters.total))
        table.add_row(*row, *sizes)
    notes = [
        f"{layers} layers, micro-batches of {tokens:,} tokens" + "; *: worst" * (len(stages) > 1)
    ]
    notes += [f"not counted: {key}, which may change memory" for key in unread(learner)]
    if learner.gpu_memory_gib is not None:
        limit = usable_bytes(learner.gpu_memory_gib) / GIB
        notes.append(
            f"fits into {USABLE_SHARE:.0%} of a GPU of {learner.gpu_memory_gib:g} GiB, which is "
            f"{limit:.1f} GiB"
        )
    table.caption = "\n".join(notes)
    return table


def _recomputation(config: Config, student: ModelFacts) -> Table:
    """Return what each value of learner.recompute keeps, and computes again."""
    learner, spec = config.learner, student.spec
    longest, kernels = longest_sample(config, student), kernels_here(config)
    work = Work.of([longest_row(config, student)], student.spec.window)
    model_flops = train_flops(spec, work)
    table = new_table(
        "learner.recompute, of the worst stage's rank",
        ("value", "activations", "total", "FLOPs again"),
    )
    for recompute in get_args(Recompute):
        chosen = learner
        if recompute != learner.recompute:
            change = {"recompute": recompute, "megatron": unrefined(learner.megatron)}
            chosen = learner.model_copy(update=change)
        worst = worst_stage(learner_memory(spec, chosen, longest, kernels))
        again = recomputed_flops(spec, work, Settings.of(chosen)) / model_flops
        mark = "*" if chosen is learner else ""
        table.add_row(
            f"{recompute}{mark}",
            byte_text(worst.activations),
            byte_text(worst.total),
            f"{again:.0%}",
        )
    table.caption = "*: configured; FLOPs again: relative to the model FLOPs of both passes"
    return table


def _shown(stages: Sequence[StageMemory], worst: StageMemory) -> list[StageMemory]:
    """Return all stages, or of many the first, the worst and the last."""
    if len(stages) <= MOST_STAGES:
        return list(stages)
    return [stage for stage in stages if stage in (stages[0], worst, stages[-1])]


def _groups(groups: Sequence[RankGroups]) -> Table:
    table = new_table(
        "learner groups", ("group", "first one's ranks", "what travels", "ranks", "of")
    )
    for column in table.columns[1:3]:
        column.justify = "left"
    for group in groups:
        row = (group.name, _ranks(group.members[0]), group.use)
        table.add_row(*row, str(group.size), str(len(group.members)))
    return table


def _ranks(members: Sequence[int]) -> str:
    """Return `0 2 4 6`, or `0 2 .. 62` for many ranks."""
    if len(members) <= 4:
        return " ".join(map(str, members))
    return f"{members[0]} {members[1]} .. {members[-1]}"


def _step(config: Config, student: ModelFacts) -> Table:
    """Return what one optimizer step reads and what one weight sync sends."""
    learner = config.learner
    longest, plays = longest_sample(config, student), config.environment
    samples = config.buffer.batch_size // learner.num_mini_batches
    rows = samples * (1 if plays is None else plays.most_sequences)
    work = Work.of([longest_row(config, student)], student.spec.window)
    flops = train_flops(student.spec, work)
    table = new_table("an optimizer step and a weight sync", ("what", "most"))
    table.add_row("samples of an optimizer step", f"{samples:,}")
    table.add_row("tokens of an optimizer step", f"{rows * longest:,}")
    share = math.ceil(rows / learner.parallel.dp)
    table.add_row("of them on one data-parallel rank", f"{share * longest:,}")
    table.add_row("model FLOPs per token, both passes", f"{flops / work.positions / 1e9:.3g} G")
    table.add_row("model FLOPs of an optimizer step", f"{flops * rows / 1e15:.3g} P")
    table.add_row("optimizer steps per weight sync", str(learner.num_mini_batches))
    return table


def _servers(config: Config, models: RunModels) -> Table:
    columns = ("servers", "GPUs", "weights", "KV per token", "KV tokens", "KV pool", "limit")
    table = new_table("server memory per GPU", columns)
    for role, facts in models.served.items():
        section = section_of(config, role)
        memory = server_memory(facts.size, section)
        count = len(section.urls) or section.servers
        stated = section.gpu_memory_gib
        tokens = memory.kv_tokens
        table.add_row(
            role,
            f"{count} x {section.tp}",
            byte_text(memory.weights),
            f"{memory.kv_token_bytes / KIB:.1f} KiB",
            "the engine's" if tokens is None else f"{tokens:,}",
            "" if tokens is None else byte_text(tokens * memory.kv_token_bytes),
            "" if stated is None else f"{stated * section.mem_fraction_static:.1f} GiB",
        )
    return table


def _turns(config: Config, student: ModelFacts) -> Table:
    """Return what a GPU that servers and learner use in turn holds in each phase of a window."""
    longest, kernels = longest_sample(config, student), kernels_here(config)
    worst = worst_stage(learner_memory(student.spec, config.learner, longest, kernels))
    server = server_memory(student.spec, config.student)
    table = new_table(
        "a GPU that student servers and learner use in turn",
        ("phase", "learner rank", "server rank", "together"),
    )
    cache = "" if server.kv_tokens is not None else " and KV cache"
    for turn in turn_memory(worst, server):
        more = cache if turn.has_cache else ""
        sizes = (turn.learner, turn.server, turn.total)
        first, *rest = map(byte_text, sizes)
        table.add_row(turn.phase, first, *(f"{size}{more}" for size in rest))
    table.caption = (
        f"besides: a CUDA context of each process, and the servers' CUDA graphs; in host memory "
        f"{byte_text(host_bytes(worst, server))} for each such GPU"
    )
    return table
