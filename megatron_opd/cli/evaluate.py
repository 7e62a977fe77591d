"""Runs `opd eval`: starts one server for one checkpoint and measures avg@k on held-out problems."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_opd.cli.accuracy import evaluation_plan
from megatron_opd.cli.errors import RunFailed, UserError
from megatron_opd.cli.joining import all_of
from megatron_opd.cli.keys import role_key
from megatron_opd.cli.placing import gpus_of_server
from megatron_opd.cli.preflight import read_model
from megatron_opd.cli.prepare import prepare
from megatron_opd.cli.processes import Processes
from megatron_opd.cli.roles import STUDENT
from megatron_opd.cli.servers import make_spec
from megatron_opd.cli.verifiers import judging
from megatron_opd.cli.weights import check_weights
from megatron_opd.cli.wiring import make_fleet
from megatron_opd.config.schema import Config
from megatron_opd.data.judge import Judge
from megatron_opd.evaluation import EvaluationReport, FleetPort, evaluate
from megatron_opd.types import Prompt
from sglang_bridge import open_files
from sglang_bridge.errors import BridgeError
from sglang_bridge.ports import free_port
from sglang_bridge.server.launch import ServerProcess


def evaluate_checkpoint(config: Config, model: Path) -> EvaluationReport:
    """Serve `model` with the student's settings and evaluate it."""
    open_files.raise_limit()
    check_weights(model, "--model", read_model(model, "--model").spec)
    prepared = prepare(config)
    if not prepared.heldout or prepared.judge is None:
        raise UserError(
            "opd eval needs evaluation.problems > 0, data.heldout and a task with a verifier"
        )
    gpus = gpus_of_server(config, STUDENT, 0)
    with tempfile.TemporaryDirectory(prefix="opd-eval-") as scratch:
        spec = make_spec(config, STUDENT, free_port(config.student.host), 0, model, gpus)
        key = role_key(config.student.model_copy(update={"urls": ()}), STUDENT)
        server = ServerProcess(spec, Path(scratch) / "server.log", key)
        try:
            return asyncio.run(_evaluate(config, prepared.heldout, prepared.judge, server, key))
        except BridgeError as error:
            raise RunFailed(str(error)) from error
        finally:
            server.stop()


async def _evaluate(
    config: Config,
    heldout: Sequence[Prompt],
    judge: Judge,
    server: ServerProcess,
    api_key: str | None,
) -> EvaluationReport:
    processes = Processes([server], None)
    processes.start()
    await all_of(processes.parts(config.student.startup_timeout_s), say=lambda _: None)
    fleet = make_fleet(config.student, [server.spec.url], api_key)
    try:
        await fleet.start()
        port = FleetPort(fleet, config.rollout.attempts)
        async with judging(judge):
            return await evaluate(port, heldout, judge, evaluation_plan(config))
    finally:
        await fleet.close()
