"""Starts the student's servers and the learner of `opd mismatch`, and measures with them.

No teacher is started. The servers get the learner's weights, as version 0: servers started
elsewhere hold the same weights afterwards, and can be used by a run. run.dir is not touched.
Invariant: every process that was started here is ended, whatever happens.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from rich.console import Console

from megatron_opd.checkpoint.claimant import Claimant
from megatron_opd.config.cluster import LAUNCHED
from megatron_opd.config.digests import learner_digests
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.load import dump_config
from megatron_opd.config.roles import STUDENT
from megatron_opd.config.schema import Config
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.data.stream import PromptSource
from megatron_opd.errors import RunFailed, UserError, checked, kept_traceback
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.fleet.ends import FirstCause, closing_all
from megatron_opd.fleet.guards import RunGuard, watched_engines, while_alive
from megatron_opd.fleet.startup import ServedModel, join_role, start_all
from megatron_opd.inputs.megatron_settings import check_megatron
from megatron_opd.inputs.model_facts import ModelFacts
from megatron_opd.inputs.models import check_models
from megatron_opd.inputs.notes import sampler_gaps, served_by
from megatron_opd.inputs.prepare import read_train
from megatron_opd.inputs.prompts import drawn_notes, skipped_lines, sources_of, unseen_keys
from megatron_opd.inputs.rendering import rendering_notes, with_template
from megatron_opd.launch.health import HealthGuard
from megatron_opd.launch.keys import role_key
from megatron_opd.launch.learner_process import LearnerProcess, learner_command
from megatron_opd.launch.parts import LEARNER
from megatron_opd.launch.placing import placement_here, with_backend
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.servers import check_addresses, server_processes
from megatron_opd.mismatch.measure import FREE, GATED, REPLAYED, MeasuredMismatch, measure
from megatron_opd.mismatch.options import Options
from megatron_opd.models.spec import ModelSpec
from megatron_opd.output import print_lines
from megatron_opd.records.types import Prompt
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.sizing.matching import Served
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.weight_sync.session import WeightSync
from megatron_opd.weight_sync.transport import transport_kind
from megatron_opd.wire.keys import RunKeys
from sglang_bridge import open_files
from sglang_bridge.fleet import Fleet

RESOLVED = "config.resolved.yaml"
VERSION = 0  # of the weights that are compared


@dataclass(frozen=True, slots=True)
class PreparedMismatch:
    """Holds the checked input. ends: of the student. notes: for the terminal."""

    student: ModelFacts
    ends: EndTokens
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...]


def prepare(config: Config, num_prompts: int) -> PreparedMismatch:
    """Check the student's model and the prompts; teachers are not looked at. Raises UserError."""
    models, _ = with_template(config, check_models(config, teachers=False), None)
    read = read_train(config, models)
    sources = sources_of(config, read)
    source = PromptSource(sources, seed=config.run.seed, shuffle=config.data.shuffle)
    notes = list(sampler_gaps(config, models.student.spec))
    notes += rendering_notes(config, models, read)
    notes += [*drawn_notes(read), *unseen_keys(config, read), *skipped_lines(read)]
    there = sum(len(each.prompts) for each in read)
    if num_prompts > there:
        notes.append(f"data.train has {there} prompts: some of the {num_prompts} are repeated")
    prompts, ends = tuple(islice(source, num_prompts)), models.ends[STUDENT]
    return PreparedMismatch(models.student, ends, prompts, tuple(notes))


def with_recorded_routing(config: Config, spec: ModelSpec) -> Config:
    """Return the configuration with experts and their weights recorded, where that is possible.

    Servers started elsewhere stay as they are, and so does a learner whose settings exclude replay.
    """
    if not spec.is_moe or config.student.urls:
        return config
    recorded = {"routing_replay": "rollout", "routing_weights": "sampler"}
    learner = config.learner.model_copy(update=recorded)
    try:
        check_megatron(spec, learner)
    except UserError:
        return config
    return config.model_copy(update={"learner": learner})


def trained_with(learner: LearnerConfig) -> str:
    """Return which of the learner's scores a train step sees."""
    if not learner.replays_experts:
        return FREE
    return GATED if learner.replays_gates else REPLAYED


class MismatchRun:
    """Performs one measurement, from checking its input to ending its processes."""

    def __init__(self, config: Config, options: Options, console: Console) -> None:
        open_files.raise_limit()
        self.options, self.console = options, console
        checked(lambda: transport_kind(config.weight_sync))
        if config.cluster.type in LAUNCHED:
            raise UserError(
                "opd mismatch: cluster.type must be local, because it starts the learner on this "
                f"machine (student.urls may name servers elsewhere), got {config.cluster.type}; "
                "add --set cluster.type=local"
            )
        self.prepared = prepare(config, options.prompts)
        check_addresses(config, learner_here=True)
        # what training sees is decided by the configuration as it was given
        self.trained = trained_with(config.learner)
        self.placement = placement_here(config, (STUDENT,))
        config = with_backend(config, self.placement)
        self.config = with_recorded_routing(config, self.prepared.student.spec)
        self.served: tuple[Served, ...] = ()
        """How servers started elsewhere compute the model, once they were asked."""

    def measure(self) -> MeasuredMismatch:
        """Measure once. UserError: bad input. RunFailed: a part failed; its logs are kept."""
        scratch = Path(tempfile.mkdtemp(prefix="opd-mismatch-"))
        try:
            return asyncio.run(self._main(scratch))
        except RunFailed:
            scratch = None
            raise
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)

    async def _main(self, scratch: Path) -> MeasuredMismatch:
        config = self.config
        keys, key = RunKeys.make(), role_key(config.student, STUDENT)
        digests = checked(lambda: learner_digests(config))
        admission = Admission(keys, digests, self.prepared.student.vocab_size)
        servers = server_processes(config, STUDENT, scratch, key, self.placement)
        urls = config.student.urls or tuple(server.url for server in servers)
        remote = checked(lambda: RemoteLearner(config, admission))
        processes = Processes(servers, self._learner(scratch, remote.address, keys))
        fleet = make_fleet(config.student, urls, key)
        ends = FirstCause(processes.watched)
        keep = partial(kept_traceback, log=scratch / "controller.log")
        async with closing_all(ends, processes, f"; logs are in {scratch}", keep) as closers:
            closers.push_async_callback(ends.closing(remote.close))
            closers.push_async_callback(ends.closing(fleet.close))
            measured = await ends.of(self._measured(scratch, processes, remote, fleet))
            await ends.closing(remote.stop)()
        return measured

    def _learner(self, scratch: Path, controller: str, keys: RunKeys) -> LearnerProcess:
        learner = self.config.learner
        command = learner_command(scratch / RESOLVED, learner, ["--controller", controller])
        log, gpus = scratch / "learner.log", self.placement.visible(LEARNER)
        return LearnerProcess(command, log, learner.threads, keys.ranks, gpus)

    async def _measured(
        self, scratch: Path, processes: Processes, remote: RemoteLearner, fleet: Fleet
    ) -> MeasuredMismatch:
        """Start everything and measure."""
        config = self.config
        self._say(*(f"note: {line}" for line in self.prepared.notes))
        if config.student.urls:  # checked before anything is started
            await self._join(fleet)
        (scratch / RESOLVED).write_text(dump_config(config), encoding="utf-8")
        self._say(
            f"starting {len(processes.servers)} SGLang servers and a learner of "
            f"{config.learner.parallel.world_size} ranks"
        )
        await start_all(config, processes, {STUDENT: fleet}, remote, self._say)
        if not config.student.urls:
            await self._join(fleet)
        health = HealthGuard(processes.watched(), watched_engines({STUDENT: fleet}))
        guard = RunGuard(lambda: health, remote)
        return await while_alive(guard, self._with_same_weights(fleet, remote))

    async def _with_same_weights(self, fleet: Fleet, remote: RemoteLearner) -> MeasuredMismatch:
        config = self.config
        make_transport = transport_kind(config.weight_sync).fleet_part
        transport = make_transport(fleet, remote.move_weights, config)
        weight_sync = WeightSync(fleet, remote, transport, config.weight_sync)
        await weight_sync.open()
        await weight_sync.sync(VERSION)
        vocab_size, run_id = self.prepared.student.vocab_size, f"mismatch-{uuid.uuid4().hex[:8]}"
        sampler = RolloutGenerator(config, fleet, vocab_size, run_id, self.prepared.ends.ids)
        try:
            measured = await measure(
                config,
                self.prepared.prompts,
                sampler,
                fleet,
                remote,
                version=VERSION,
                trained=self.trained,
                say=self._say,
            )
        except ValueError as error:
            raise RunFailed(str(error)) from error
        if config.student.urls:
            await weight_sync.close()  # servers that outlive this leave its group
        return measured

    async def _join(self, fleet: Fleet) -> None:
        student = self.prepared.student
        model = ServedModel(student.vocab_size, self.prepared.ends, student.spec)
        notes = await join_role(self.config, STUDENT, fleet, model, Claimant("opd mismatch"))
        if self.config.student.urls:
            self.served = tuple(map(served_by, fleet.infos))
        self._say(*(f"note: {line}" for line in notes))

    def _say(self, *lines: str) -> None:
        print_lines(self.console, *lines)
