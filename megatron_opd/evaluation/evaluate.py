"""Runs `opd eval`: starts one server for a checkpoint and evaluates it on the held-out sets."""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from megatron_opd.config.roles import STUDENT
from megatron_opd.config.schema import Config
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.data.judge import Judge
from megatron_opd.data.template import RunTemplate, this_moment
from megatron_opd.errors import UserError
from megatron_opd.evaluation.measure import (
    EvaluationReport,
    FleetPort,
    evaluate,
)
from megatron_opd.evaluation.sets import EvaluatedSet, evaluated_sets
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.fleet.ends import FirstCause, closing_all
from megatron_opd.fleet.startup import start_all
from megatron_opd.inputs.model_facts import check_exact, read_evaluated
from megatron_opd.inputs.models import check_ends, ends_of
from megatron_opd.inputs.prepare import make_verifiers, prepare
from megatron_opd.inputs.rendering import template_of_run
from megatron_opd.inputs.tokenizers import load_tokenizer
from megatron_opd.inputs.verifiers import judging
from megatron_opd.inputs.weights import served_tensors
from megatron_opd.launch.keys import role_key
from megatron_opd.launch.placing import gpus_of_server
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.servers import make_spec
from sglang_bridge import open_files
from sglang_bridge.ports import free_port
from sglang_bridge.server.launch import ServerProcess

Found = Callable[[str, EvaluationReport], None]
"""Takes the report of a set, as soon as it is there."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Holds what every checkpoint is asked: sets by name, and who judges the answers.

    template: what the sets were rendered with.
    """

    config: Config
    sets: Mapping[str, EvaluatedSet]
    judge: Judge
    template: RunTemplate


def questions_of(config: Config, clock: datetime | None = None) -> Questions:
    """Read the held-out sets of a configuration. Raises UserError.

    clock: the moment that chat templates are given; None: that of the run in run.dir, or now.
    """
    open_files.raise_limit()
    of_run = template_of_run(config.run.dir) if clock is None else None
    clock = of_run.clock if of_run is not None else clock or this_moment()
    prepared = prepare(config, kept=RunTemplate(clock))
    sets = evaluated_sets(config, prepared.heldout)
    if not sets or prepared.judge is None:
        raise UserError(
            "opd eval needs evaluation.problems > 0, data.heldout and a task with a verifier"
        )
    return Questions(config, sets, prepared.judge, prepared.template)


def evaluate_checkpoint(config: Config, model: Path) -> dict[str, EvaluationReport]:
    """Serve `model` with the student's settings and evaluate it; return {set: report}."""
    facts = read_evaluated(model, "--model")
    served_tensors(model, "--model", facts.raw)
    check_exact("student", facts, config.student)
    reports: dict[str, EvaluationReport] = {}
    ask(questions_of(config), model, reports.__setitem__)
    return reports


def ask(questions: Questions, model: Path, found: Found) -> None:
    """Serve the Hugging Face checkpoint `model` and evaluate it on every set. RunFailed."""
    config, key = questions.config, f"{model}"
    facts = read_evaluated(model, key)
    ending = ends_of(config, key, facts, load_tokenizer(model, key))
    gpus = gpus_of_server(config, STUDENT, 0)
    with tempfile.TemporaryDirectory(prefix="opd-eval-") as scratch:
        spec = make_spec(config, STUDENT, free_port(config.student.host), 0, model, gpus)
        key = role_key(config.student.model_copy(update={"urls": ()}), STUDENT)
        server = ServerProcess(spec, Path(scratch) / "server.log", key)
        asyncio.run(_ask(questions, server, key, ending, found))


async def _ask(
    questions: Questions,
    server: ServerProcess,
    api_key: str | None,
    ending: EndTokens,
    found: Found,
) -> None:
    config, processes = questions.config, Processes([server], None)
    ends = FirstCause(processes.watched)

    async def stages(closers: AsyncExitStack) -> None:
        fleet = make_fleet(config.student, [server.spec.url], api_key)
        closers.push_async_callback(ends.closing(fleet.close))
        await start_all(config, processes, {STUDENT: fleet}, None, lambda _: None)
        for info in await fleet.start():
            check_ends("opd eval", info, ending)
        port = FleetPort(fleet, config.rollout.attempts, ending.ids)
        # workers of their own for each checkpoint: they belong to one event loop
        judge = replace(questions.judge, verifiers=make_verifiers(config))
        await closers.enter_async_context(judging(judge))
        for name, each in questions.sets.items():
            found(name, await evaluate(port, each.prompts, judge, each.plan))

    async with closing_all(ends, processes, "", _shown) as closers:
        await ends.of(stages(closers))


def _shown(error: BaseException) -> str:
    """Print the traceback of an unforeseen error; return where it is."""
    traceback.print_exception(error)
    return "its traceback is above"
