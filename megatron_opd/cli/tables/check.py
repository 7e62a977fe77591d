"""Runs `opd check`.

It validates what can be validated without starting anything, then prints the plan.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_opd.checkpoint.run_dir import check_place
from megatron_opd.cli.tables.memory import memory_tables
from megatron_opd.cli.tables.placement import placement_table
from megatron_opd.cli.tables.schedule_words import (
    in_verls_words,
    open_in_words,
    schedule_in_words,
)
from megatron_opd.cli.tables.weight_sync import sync_tables
from megatron_opd.config.defaults import said
from megatron_opd.config.kernels import choose_kernels
from megatron_opd.config.roles import STUDENT, Role, all_roles, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.selection import RewardSpread
from megatron_opd.config.speedups import choose_speedups
from megatron_opd.config.teacher import TeacherConfig
from megatron_opd.config.teacher_api import SCORABLE
from megatron_opd.config.tree import key_of_teacher
from megatron_opd.config.wording import listed
from megatron_opd.data.unread_columns import unread_columns
from megatron_opd.environments.trajectory import trajectory_limits
from megatron_opd.errors import checked
from megatron_opd.inputs.extra_args import check_extra_args, check_stops
from megatron_opd.inputs.model_facts import ModelFacts, RunModels
from megatron_opd.inputs.models import check_inputs_are_kept, prompt_limit
from megatron_opd.inputs.prepare import Inputs, prompt_rules, read_inputs
from megatron_opd.inputs.prompts import key_of_set
from megatron_opd.inputs.rendering import first_prompt
from megatron_opd.inputs.weights import check_finite, has_weights
from megatron_opd.launch.gpus import has_gpu
from megatron_opd.losses.formulas import formula
from megatron_opd.records.drops import DROPS
from megatron_opd.weight_sync.transport import transport_kind
from sglang_bridge import open_files
from sglang_bridge.toolkit import HOST_COMPILERS, kept_kernels, toolkit

# Files that a controller has open before it connects to anything: measured 60, rounded up.
OWN_FILES = 128
PER_SERVER_FILES, PER_RANK_FILES = 8, 4

FIRST_ROWS = 64
NO_TOOLKIT = (
    "nothing: no nvcc in CUDA_HOME, beside this program or in /usr/local/cuda. SGLang compiles "
    "kernels when a server first starts; install requirements/gpu.lock (make setup-gpu), or set "
    "CUDA_HOME"
)
NOT_KEPT = (
    "no kernel is kept yet: the first start compiles them, some ten seconds each and a "
    "minute or more in all; startup_timeout_s is counted anew meanwhile"
)
# GB/s of a 400 Gb/s network card
LINK_GBS = 50.0


def _lengths(config: Config, student: ModelFacts) -> str:
    most = config.rollout.max_new_tokens
    if config.environment is None:
        return f"<= {prompt_limit(config, student)} prompt + {most} new tokens"
    limits = trajectory_limits(config.environment, most)
    sequences = f" x {limits.max_sequences} sequences" if limits.max_sequences > 1 else ""
    return (
        f"<= {limits.max_turns} turns of {limits.max_turn_tokens} new tokens, "
        f"{limits.most_sampled} in all, in {limits.max_tokens} tokens{sequences}"
    )


def plan_rows(config: Config, models: RunModels) -> list[tuple[str, str]]:
    """Return the (what, value) lines of the plan, in the order of the data flow."""
    parallel, buffer, rollout = config.learner.parallel, config.buffer, config.rollout
    group = f"{rollout.group_size} responses per prompt, " if rollout.group_size > 1 else ""
    return [
        *(
            (role, f"{facts.architecture}, vocabulary {facts.vocab_size}, {facts.path}")
            for role, facts in models.served.items()
        ),
        (
            "rollout",
            f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, "
            f"{group}{_lengths(config, models.student)}",
        ),
        *schedule_rows(config),
        *formula(config.estimator),
        *alignment_row(config),
        *said(config),
        (
            "learner",
            f"tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp {parallel.dp} = "
            f"{parallel.world_size} ranks, experts ep {parallel.ep} x etp {parallel.expert_tp}, "
            f"{config.learner.dtype}",
        ),
        *routing_row(config),
        *kernel_rows(config, moe=models.student.spec.is_moe),
        (
            "updates",
            f"{config.run.max_steps} of {buffer.batch_size} samples in "
            f"{config.learner.num_mini_batches} mini-batches, "
            f"micro-batches of <= {config.learner.max_tokens_per_microbatch} tokens",
        ),
        *((f"{role} servers", server_row(config, role)) for role in models.served),
        *site_rows(config),
        *drop_rows(config),
        ("open files", open_files_row(config)),
        ("run directory", str(config.run.dir)),
    ]


def alignment_row(config: Config) -> list[tuple[str, str]]:
    """Return the line on how a teacher of another tokenizer scores, if it is one."""
    alignment = config.scoring.alignment
    return [] if alignment is None else [("alignment", alignment.text())]


def schedule_rows(config: Config) -> list[tuple[str, str]]:
    """Return the lines on when samples are taken and how old they get."""
    if config.sites.is_open:
        slots, every = sum(config.site_slots.values()), config.schedule.sync_every
        return [("schedule", open_in_words(config.sites.max_staleness, slots, every))]
    return [
        ("schedule", schedule_in_words(config.schedule, config.buffer.batch_size)),
        ("in verl's words", in_verls_words(config.schedule)),
    ]


def site_rows(config: Config) -> list[tuple[str, str]]:
    """Return the lines on sampler sites, which start servers of their own."""
    slots, sites = config.site_slots, config.sites
    rows = [
        (
            f"site {name}",
            f"{slots[name]} prompts at once on "
            f"{config.student.servers if site.servers is None else site.servers} student servers; "
            f"{'its own teachers' if site.scores else 'teachers of the learner'}",
        )
        for name, site in sites.members.items()
    ]
    if not rows:
        return []
    bound = (
        f"tcp://{sites.host}:{sites.port}; samples at most {config.staleness_bound} updates old "
        f"and {sites.max_delay_s:g} s on their way; prompts of a site that is lost are given to "
        f"others after {sites.lost_after_s:g} s"
    )
    return [*rows, ("sites connect to", bound)]


def drop_rows(config: Config) -> list[tuple[str, str]]:
    """Return a line for each reason for which a sample of this run may be dropped."""
    estimator, selection = config.estimator, config.selection
    possible = {
        "any": True,
        "teacher": estimator.asks_teacher,
        "reward": estimator.reads_reward,
        "group": estimator.reads_groups,
        "spread": isinstance(selection.groups, RewardSpread),
        "overlong": selection.overlong.type == "filter",
        "sites": bool(config.sites.members),
        "environment": config.environment is not None,
        "turn": estimator.credit == "turn",
    }
    return [
        ("may drop", f"{drop.word}: {drop.meaning}; {drop.remedy}")
        for drop in DROPS.values()
        if possible[drop.where]
    ]


def kernel_rows(config: Config, *, moe: bool) -> list[tuple[str, str]]:
    """Return the lines on what a learner on this machine computes with, and why."""
    kernels, cuda = choose_kernels(has_gpu()), has_gpu()
    exact = config.run.deterministic
    speedups = choose_speedups(config.learner, kernels, cuda=cuda, moe=moe, deterministic=exact)
    rows = dict([*kernels.reasons, *speedups.reasons])
    given = config.learner.megatron.get("gradient_accumulation_fusion")
    if given is not None:
        how = "fused" if given else "not fused"
        key = "learner.megatron.gradient_accumulation_fusion"
        rows["weight gradients here"] = f"{how}, as {key} says"
    if cuda:
        rows["servers compile by"] = compiler_words(os.environ)
    return list(rows.items())


def compiler_words(environment: Mapping[str, str]) -> str:
    """Return what servers compile SGLang's kernels by, and whether their first start will."""
    found = toolkit(environment)
    if found is None:
        return NO_TOOLKIT
    path = environment.get("PATH")
    absent = [name for name in HOST_COMPILERS if shutil.which(name, path=path) is None]
    if absent:
        return f"{found / 'bin' / 'nvcc'}, which needs {' and '.join(absent)} on PATH: install g++"
    cache, kept = kept_kernels(environment)
    first = NOT_KEPT if kept == 0 else f"{kept} kernels are kept"
    return f"{found / 'bin' / 'nvcc'}; in {cache} {first}"


def routing_row(config: Config) -> list[tuple[str, str]]:
    """Return the line on routing replay, if the learner's routers do not choose by themselves."""
    sources = {
        "rollout": "the experts that the fleet's routers chose for every token (R3)",
        "current": "the experts that the learner's routers choose at each batch's start",
    }
    mode = config.learner.routing_replay
    if mode not in sources:
        return []
    weighed = ", weighed as there" if config.learner.replays_gates else ""
    return [("routing", f"{mode}: {sources[mode]}{weighed}")]


def open_files_needed(config: Config) -> int:
    """Return how many files the controller holds open at most, rounded up a little.

    These are one connection for each request in flight, its connection pool, logs and libraries.
    """
    rollouts = min(config.rollout.concurrency, config.permits)
    evaluated = rollouts if not config.evaluation.runs else config.rollout.concurrency
    scores = config.scoring.concurrency if len(all_roles(config)) > 1 else 0
    servers = sum(
        len(section_of(config, role).urls) or section_of(config, role).servers
        for role in all_roles(config)
    )
    ranks = config.learner.parallel.world_size
    control = PER_SERVER_FILES * servers + PER_RANK_FILES * ranks
    beside = config.evaluation.concurrency if config.evaluation.every else 0
    return max(rollouts + scores + beside, evaluated) + control + OWN_FILES


def open_files_row(config: Config) -> str:
    """Return how many files a run opens and how many this machine allows."""
    soft, hard = open_files.limits()
    needed = open_files_needed(config)
    allowed = "no limit" if hard == open_files.UNLIMITED else f"{hard} allowed"
    short = hard != open_files.UNLIMITED and needed > hard
    remedy = "; TOO FEW: raise the hard limit (ulimit -Hn) or lower concurrency" if short else ""
    raised = f" (the limit of {soft} is raised at start)" if soft != hard else ""
    return f"about {needed} needed, {allowed}{raised}{remedy}"


def server_row(config: Config, role: Role) -> str:
    """Return where a role's servers come from and how each is sharded."""
    section = section_of(config, role)
    where = ", ".join(section.urls) or f"{section.servers} started on {section.host}"
    if isinstance(section, TeacherConfig) and not section.speaks_bridge:
        scored = " or ".join(SCORABLE[section.api].supports or ()) or "nothing"
        return f"{where}; without the plugin, asked as {section.api}, which scores {scored}"
    held = section.dtype
    if section.quantization is not None:
        held += f", matrices held as {section.quantization}"
    elif role == STUDENT and config.weight_sync.round_to is not None:
        held += f", matrices rounded to {config.weight_sync.round_to} but held in {section.dtype}"
    return f"{where}; tp {section.tp} x ep {section.ep}, {held}"


def data_rows(config: Config, inputs: Inputs, limit: int) -> list[tuple[str, str]]:
    """Return what was read of each data file. limit: tokens of the longest prompt that fits."""
    lines: list[tuple[str, str]] = []
    read = [("data.train", found) for found in inputs.train]
    read += [(f"data.{key_of_set(config, name)}", each) for name, each in inputs.heldout.items()]
    for key, found in read:
        rows, tally = found.tally.rows, found.tally
        how = f"all {rows} rows" if found.whole else f"the first {rows} rows"
        if found.drawn is not None and not found.whole:
            how = f"{rows} of {len(found.prompts)} rows"
        tokens = f"longest prompt {tally.longest} tokens, limit {limit}"
        if inputs.checked.tokenizer is None:
            tokens = "not tokenised: no tokenizer on this machine"
        unusable = sum(tally.skipped.values())
        lines.append((key, f"{found.path}: {how} read, {unusable} to be skipped; {tokens}"))
    return lines


def first_prompt_row(inputs: Inputs) -> list[tuple[str, str]]:
    """Return the line of the first prompt, as the student is given it, and as its teacher is."""
    tokenizer = inputs.checked.tokenizer
    prompt = next((prompt for found in inputs.train for prompt in found.examples), None)
    if tokenizer is None or prompt is None:
        return []
    rows = [("first prompt", first_prompt(tokenizer, prompt.token_ids_P.tolist()))]
    if prompt.teacher_ids_Q is not None:
        theirs = inputs.checked.teachers.get(key_of_teacher(prompt.teacher), tokenizer)
        rows.append(("its teacher's", first_prompt(theirs, prompt.teacher_ids_Q.tolist())))
    return rows


def unread_rows(config: Config, inputs: Inputs) -> list[tuple[str, str]]:
    """Return a line for each file with columns that no key of data names."""
    wanted = prompt_rules(config, inputs.checked, heldout=False).columns.wanted
    found = {each.path: unread_columns(each.path, wanted) for each in inputs.train}
    return [("not read", f"{path}: {listed(names)}") for path, names in found.items() if names]


def check(
    config: Config, console: Console, *, data: bool = False, link_gbs: float = LINK_GBS
) -> None:
    """Raise UserError for the first problem, otherwise print the plan and its memory tables.

    data: read all rows and all weights instead of the first rows and the headers. link_gbs: GB/s
    at which a rank sends weights.
    """
    check_inputs_are_kept(config)
    checked(lambda: transport_kind(config.weight_sync))
    first_rows = None if data else FIRST_ROWS
    inputs = read_inputs(config, plan=True, first_rows=first_rows, data=data, judge_all=data)
    models = inputs.checked.models
    if not inputs.absent:  # otherwise the plan is for another machine
        check_place(config.run.dir)
    for role in models.served:
        check_extra_args(section_of(config, role), role)
    check_stops(config)
    if data:
        for role, facts in models.served.items():
            if has_weights(facts.path):
                check_finite(facts.path, f"{role}.model")
    gpus = placement_table(config, models, elsewhere=bool(inputs.absent))
    rows = [
        *plan_rows(config, models),
        *data_rows(config, inputs, prompt_limit(config, models.student)),
        *first_prompt_row(inputs),
        *unread_rows(config, inputs),
        *(("note", line) for line in inputs.notes),
        *(("not checked", f"{line}; opd run needs it") for line in inputs.absent),
    ]
    if not data and (inputs.train or inputs.checked.tokenizer is not None):
        rows.append(
            ("not checked", "further rows and the numbers in the weights: opd check --data")
        )
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a long path whole, over several lines
    for what, value in rows:
        # a path or a value of the user's may hold brackets, which are not markup
        table.add_row(f"[bold]{what}[/bold]", escape(value))
    console.print(table)
    spec = models.student.spec
    syncs = checked(lambda: list(sync_tables(config, spec, link_gbs)))
    for each in (*memory_tables(config, models), gpus, *syncs):
        console.print()
        console.print(each)
