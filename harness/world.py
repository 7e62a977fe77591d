"""Makes the processes of a case: a learner, the controller's end of it, and servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from megatron_opd.config.load import dump_config
from megatron_opd.config.schema import Config
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.launch.learner_process import LearnerProcess, learner_command
from megatron_opd.launch.processes import Processes
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.wire.keys import RunKeys
from sglang_bridge.fleet import Fleet
from sglang_bridge.server.launch import ServerProcess

STARTUP_S = 400.0
World = tuple[RemoteLearner, LearnerProcess]


def learner_world(config: Config, scratch: Path, name: str = "learner") -> World:
    """A learner that is not started yet; its configuration and log are called `name`."""
    keys = RunKeys.make()
    remote = RemoteLearner(config, Admission(keys))
    file = scratch / f"{name}.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    command = learner_command(file, config.learner, ["--controller", remote.address])
    log = scratch / f"{name}.log"
    return remote, LearnerProcess(command, log, config.learner.threads, keys.ranks)


@asynccontextmanager
async def started_world(
    servers: Sequence[ServerProcess], learner: World | None = None
) -> AsyncIterator[Processes]:
    """Start servers, and a learner where one is given, and wait for them; stop all at the end."""
    remote, world = learner or (None, None)
    processes = Processes(servers, world)
    try:
        processes.start()
        waits = [asyncio.to_thread(server.wait_ready, STARTUP_S) for server in servers]
        await asyncio.gather(*waits, *([remote.wait_ready(STARTUP_S)] if remote else []))
        yield processes
    finally:
        if remote is not None:
            await remote.stop()
        await processes.stop()


def with_model(config: Config, model: str) -> Config:
    """The configuration with another checkpoint of the student."""
    student = config.student.model_copy(update={"model": Path(model)})
    return config.model_copy(update={"student": student})


def fleet_of(config: Config, processes: Processes) -> Fleet:
    """The fleet of all student servers of a world, to be entered."""
    return make_fleet(config.student, [server.spec.url for server in processes.servers])
