"""`opd check`: validate what can be validated without starting anything, then print the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from megatron_opd.cli.extra_args import check_extra_args
from megatron_opd.cli.gpu import has_gpu
from megatron_opd.cli.memory_tables import memory_tables
from megatron_opd.cli.preflight import ModelFacts, check_plan, prompt_limit
from megatron_opd.cli.roles import STUDENT, Role, all_roles, section_of
from megatron_opd.config.estimator import trust_of
from megatron_opd.config.kernels import choose_kernels
from megatron_opd.config.schema import Config
from megatron_opd.losses.formulas import formula
from sglang_bridge import open_files

# Files that a controller has open before it has connected to anything: measured 60, rounded up.
OWN_FILES = 128
PER_SERVER_FILES, PER_RANK_FILES = 8, 4


def plan_rows(config: Config, models: Mapping[Role, ModelFacts]) -> list[tuple[str, str]]:
    """(what, value) lines of the plan, in the order of the data flow. models: by role."""
    parallel, buffer, rollout = config.learner.parallel, config.buffer, config.rollout
    group = f"{rollout.group_size} responses a prompt, " if rollout.group_size > 1 else ""
    return [
        *(
            (role, f"{facts.architecture}, vocabulary {facts.vocab_size}, {facts.path}")
            for role, facts in models.items()
        ),
        (
            "rollout",
            f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, "
            f"{group}<= {prompt_limit(config, models[STUDENT])} prompt + "
            f"{rollout.max_new_tokens} new tokens",
        ),
        (
            "staleness",
            f"tau = {buffer.max_staleness} versions: "
            f"({buffer.max_staleness} + 1) * {buffer.batch_size} = {buffer.permits} permits",
        ),
        *formula(config.estimator),
        *notes(config),
        (
            "learner",
            f"tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp {parallel.dp} = "
            f"{parallel.world_size} ranks, experts ep {parallel.ep} x etp {parallel.expert_tp}, "
            f"{config.learner.dtype}",
        ),
        *routing_row(config),
        *choose_kernels(has_gpu()).reasons,
        (
            "updates",
            f"{config.run.updates} of {buffer.batch_size} samples in "
            f"{config.learner.mini_batches} mini-batches, "
            f"micro-batches of <= {config.learner.tokens_per_microbatch} tokens",
        ),
        *((f"{role} servers", server_row(config, role)) for role in models),
        ("open files", open_files_row(config)),
        ("run directory", str(config.run.dir)),
    ]


def notes(config: Config) -> list[tuple[str, str]]:
    """What is allowed and yet probably not meant."""
    estimator = config.estimator
    bounded = any(trust_of(term).type != "none" for term in estimator.terms)
    if bounded and estimator.applied_correction.prox and config.learner.mini_batches == 1:
        return [
            (
                "note",
                "the trust region never acts: with correction.prox its ratio is that of the "
                "batch's start, and learner.mini_batches 1 makes one step from there",
            )
        ]
    return []


def routing_row(config: Config) -> list[tuple[str, str]]:
    """Whose experts the learner's tokens visit, where that is not its own choice."""
    sources = {
        "rollout": "the experts that the fleet's routers chose for every token (R3)",
        "current": "the experts that the learner's routers choose at each batch's start",
    }
    mode = config.learner.routing_replay
    return [("routing", f"{mode}: {sources[mode]}")] if mode in sources else []


def open_files_needed(config: Config) -> int:
    """Files that the controller holds open at most, a little rounded up.

    A connection for each request in flight, and those that hold its pool, logs and libraries.
    """
    rollouts = min(config.rollout.concurrency, config.buffer.permits)
    evaluated = rollouts if not config.evaluation.runs else config.rollout.concurrency
    scores = config.scoring.concurrency if len(all_roles(config)) > 1 else 0
    servers = sum(
        len(section_of(config, role).urls) or section_of(config, role).servers
        for role in all_roles(config)
    )
    ranks = config.learner.parallel.world_size
    control = PER_SERVER_FILES * servers + PER_RANK_FILES * ranks
    return max(rollouts + scores, evaluated) + control + OWN_FILES


def open_files_row(config: Config) -> str:
    """What a run opens beside what this machine allows."""
    soft, hard = open_files.limits()
    needed = open_files_needed(config)
    allowed = "no limit" if hard == open_files.UNLIMITED else f"{hard} allowed"
    short = hard != open_files.UNLIMITED and needed > hard
    remedy = "; TOO FEW: raise the hard limit (ulimit -Hn) or lower concurrency" if short else ""
    raised = f" (the limit of {soft} is raised at start)" if soft != hard else ""
    return f"about {needed} needed, {allowed}{raised}{remedy}"


def server_row(config: Config, role: Role) -> str:
    """Where a role's servers come from and how each is sharded."""
    section = section_of(config, role)
    where = ", ".join(section.urls) or f"{section.servers} started on {section.host}"
    return f"{where}; tp {section.tp} x ep {section.ep}, {section.dtype}"


def check(config: Config, console: Console) -> None:
    """Raise UserError for the first problem, else print the plan and its memory tables."""
    models, bare = check_plan(config)
    for role in models:
        check_extra_args(section_of(config, role), role)
    table = Table(show_header=False, box=None)
    for what, value in [*plan_rows(config, models), *bare_rows(bare)]:
        table.add_row(f"[bold]{what}[/bold]", value)
    console.print(table)
    for each in memory_tables(config, models):
        console.print()
        console.print(each)


def bare_rows(bare: Sequence[Role]) -> list[tuple[str, str]]:
    """What was not checked for want of files."""
    if not bare:
        return []
    keys = ", ".join(f"{role}.model" for role in bare)
    rest = "weights and tokenizers are not there to be checked; opd run needs them"
    return [("note", f"planned from config.json alone: {keys}; {rest}")]
