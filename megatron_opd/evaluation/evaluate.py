"""Runs `opd eval`: starts one server for a checkpoint and evaluates it on the held-out sets.

Where a teacher plays the user, a server of that teacher is started beside it, unless its section
names servers.
"""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from megatron_opd.config.roles import STUDENT, Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.data.judge import Judge
from megatron_opd.data.template import RunTemplate, this_moment
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.environments.user import UserPart
from megatron_opd.errors import UserError
from megatron_opd.evaluation.measure import evaluate
from megatron_opd.evaluation.ports import FleetPort
from megatron_opd.evaluation.reports import EvaluationReport
from megatron_opd.evaluation.sets import EvaluatedSet, evaluated_sets
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.fleet.ends import FirstCause, closing_all
from megatron_opd.fleet.startup import start_all
from megatron_opd.inputs.environments import playing
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
from sglang_bridge.fleet import Fleet
from sglang_bridge.ports import free_port
from sglang_bridge.server.launch import ServerProcess

Found = Callable[[str, EvaluationReport], None]
"""Takes the report of a set, as soon as it is there."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Holds what every checkpoint is asked: sets by name, and who judges the answers.

    template: what the sets were rendered with. judge: None where environments alone judge. turns:
    encodes what an environment says; None without one. user: how a teacher plays the user; None
    where none does. ends: the ids that end a response of every role's model.
    """

    config: Config
    sets: Mapping[str, EvaluatedSet]
    judge: Judge | None
    template: RunTemplate
    turns: TurnEncoder | None = None
    user: UserPart | None = None
    ends: Mapping[Role, EndTokens] = field(default_factory=dict[Role, EndTokens])


@dataclass(frozen=True, slots=True)
class EvaluatedServers:
    """Holds the servers of a role. process: one that is started here; None: none is."""

    urls: Sequence[str]
    api_key: str | None
    process: ServerProcess | None = None


def questions_of(config: Config, clock: datetime | None = None) -> Questions:
    """Read the held-out sets of a configuration. Raises UserError.

    clock: the moment that chat templates are given; None: that of the run in run.dir, or now.
    """
    open_files.raise_limit()
    of_run = template_of_run(config.run.dir) if clock is None else None
    clock = of_run.clock if of_run is not None else clock or this_moment()
    prepared = prepare(config, kept=RunTemplate(clock))
    sets = evaluated_sets(config, prepared.heldout)
    if not sets or (prepared.judge is None and config.environment is None):
        raise UserError(
            "opd eval needs evaluation.problems > 0, data.heldout and a task with a verifier, or "
            "section environment"
        )
    return Questions(
        config,
        sets,
        prepared.judge,
        prepared.template,
        prepared.turns,
        prepared.user,
        prepared.ends,
    )


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
    with tempfile.TemporaryDirectory(prefix="opd-eval-") as scratch:
        served = {STUDENT: _served(config, STUDENT, model, Path(scratch) / "server.log")}
        if questions.user is not None:
            role = questions.user.role
            section = section_of(config, role)
            served[role] = (
                EvaluatedServers(section.urls, role_key(section, role))
                if section.urls
                else _served(config, role, section.model, Path(scratch) / f"{role}.log", beside=1)
            )
        asyncio.run(_ask(questions, served, ending, found))


def _served(
    config: Config, role: Role, model: Path, log: Path, beside: int = 0
) -> EvaluatedServers:
    """Return a server of a role that holds `model`, not started. beside: so many others."""
    section = section_of(config, role).model_copy(update={"urls": ()})
    gpus = gpus_of_server(config, role, 0 if section.gpus else beside)
    spec = make_spec(config, role, free_port(section.host), 0, model, gpus)
    key = role_key(section, role)
    process = ServerProcess(spec, log, key)
    return EvaluatedServers([process.spec.url], key, process)


async def _ask(
    questions: Questions, served: Mapping[Role, EvaluatedServers], ending: EndTokens, found: Found
) -> None:
    config = questions.config
    processes = Processes([each.process for each in served.values() if each.process], None)
    ends = FirstCause(processes.watched)

    async def stages(closers: AsyncExitStack) -> None:
        fleets: dict[Role, Fleet] = {}
        for role, each in served.items():
            fleets[role] = make_fleet(section_of(config, role), each.urls, each.api_key)
            closers.push_async_callback(ends.closing(fleets[role].close))
        await start_all(config, processes, fleets, None, lambda _: None)
        for role, each in fleets.items():
            infos, own = await each.start(), ending if role == STUDENT else questions.ends[role]
            for info in infos:
                check_ends("opd eval", info, own)
        fleet = fleets[STUDENT]
        port = FleetPort(fleet, config.rollout.attempts, ending.ids)
        # workers of their own for each checkpoint: they belong to one event loop
        judge = questions.judge
        if judge is not None:
            judge = replace(judge, verifiers=make_verifiers(config))
        await closers.enter_async_context(judging(judge))
        trajectories = playing(config, questions.turns, questions.user, fleets)
        plays = await closers.enter_async_context(trajectories)
        for name, each in questions.sets.items():
            found(name, await evaluate(port, each.prompts, judge, each.plan, plays))

    async with closing_all(ends, processes, "", _shown) as closers:
        await ends.of(stages(closers))


def _shown(error: BaseException) -> str:
    """Print the traceback of an unforeseen error; return where it is."""
    traceback.print_exception(error)
    return "its traceback is above"
