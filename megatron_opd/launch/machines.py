"""Says what a run starts, and where: on this machine, on a cluster's, or nothing at all.

Nothing is started here; what is made is started and ended by processes.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.config.roles import Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError, checked
from megatron_opd.launch.handles import LearnerHandle, ServerHandle
from megatron_opd.launch.launcher import Launcher, Need, NodePlace, ProcessSpec
from megatron_opd.launch.learner_process import LearnerProcess, learner_command
from megatron_opd.launch.parts import LEARNER, WORKERS
from megatron_opd.launch.placing import parts_of, placement_here, with_backend
from megatron_opd.launch.remote import RemoteLearnerProcess, RemoteServer
from megatron_opd.launch.servers import log_name, server_processes
from megatron_opd.launch.specs import (
    learner_needs,
    learner_specs,
    server_spec,
    worker_arguments,
    worker_spec,
)
from megatron_opd.wire.keys import RANK_VARIABLE, RankKeys

Say = Callable[[str], None]
LOOPBACK = "127.0.0.1"
WORKER_THREADS = 1


def _ray(config: Config) -> Launcher:
    from megatron_opd.launch.ray_cluster import RayLauncher

    return RayLauncher(config.cluster.ray, insecure=config.security.insecure)


def _slurm(config: Config) -> Launcher:
    from megatron_opd.launch.slurm import SlurmLauncher

    return SlurmLauncher()


LAUNCHERS: dict[str, Callable[[Config], Launcher]] = {"ray": _ray, "slurm": _slurm}
"""What starts processes on a cluster's machines, by cluster.type; each is imported when it is
used."""


class Machines(Protocol):
    """Describes where the parts of one run are.

    config: what the run goes on with: addresses and backends fit the machines. starts: whether
    servers and learner are started by the run. learner_here: whether the learner's rank 0 is on
    this machine.
    """

    config: Config
    starts: bool
    learner_here: bool

    def servers(self, role: Role, logs: Path, api_key: str | None) -> Sequence[ServerHandle]:
        """Return a role's servers, not started; none where the configuration names others."""
        ...

    def learner(
        self, config_file: Path, controller: str, keys: RankKeys, log: Path
    ) -> LearnerHandle | None:
        """Return the learner, not started, which joins `controller`; None: it starts elsewhere."""
        ...

    def worker(
        self, index: int, config_file: Path, controller: str, keys: RankKeys, log: Path
    ) -> LearnerHandle:
        """Return a data worker, not started, which joins `controller`."""
        ...

    @property
    def line(self) -> str | None:
        """Returns for the user what runs where; None where there is nothing to say."""
        ...


class Here:
    """Starts everything on this machine, each process on GPUs of its own."""

    starts = learner_here = True

    def __init__(self, config: Config, roles: Sequence[Role]) -> None:
        self._placement = placement_here(config, roles)
        self.config = with_backend(config, self._placement)

    def servers(self, role: Role, logs: Path, api_key: str | None) -> Sequence[ServerHandle]:
        """Return as Machines says."""
        return server_processes(self.config, role, logs, api_key, self._placement)

    def learner(
        self, config_file: Path, controller: str, keys: RankKeys, log: Path
    ) -> LearnerHandle | None:
        """Return as Machines says."""
        learner = self.config.learner
        command = learner_command(config_file, learner, ["--controller", controller])
        gpus = self._placement.visible(LEARNER)
        return LearnerProcess(command, log, learner.threads, keys, gpus)

    def worker(
        self, index: int, config_file: Path, controller: str, keys: RankKeys, log: Path
    ) -> LearnerHandle:
        """Return as Machines says."""
        return worker_here(self.config, index, config_file, controller, keys, log)

    @property
    def line(self) -> str | None:
        """Returns the GPUs of every process."""
        return f"GPUs: {self._placement.line}" if self._placement.groups else None


class Elsewhere:
    """Starts nothing but data workers: servers and learner are started by something else."""

    starts = learner_here = False
    line = None

    def __init__(self, config: Config, roles: Sequence[Role]) -> None:
        self.config = config
        for role in roles:
            if not section_of(config, role).urls:
                raise UserError(
                    f"{role}.urls must list servers started elsewhere with opd control or "
                    "cluster.type: external, got []"
                )
        if config.learner.listen_port == 0:
            raise UserError(
                "learner.listen_port must be a fixed port with opd control or "
                "cluster.type: external, got 0"
            )

    def servers(self, role: Role, logs: Path, api_key: str | None) -> Sequence[ServerHandle]:
        """Return none: they are started elsewhere."""
        return ()

    def learner(
        self, config_file: Path, controller: str, keys: RankKeys, log: Path
    ) -> LearnerHandle | None:
        """Return none: it is started elsewhere."""
        return None

    def worker(
        self, index: int, config_file: Path, controller: str, keys: RankKeys, log: Path
    ) -> LearnerHandle:
        """Return as Machines says: on this machine."""
        return worker_here(self.config, index, config_file, controller, keys, log)


def worker_here(
    config: Config, index: int, config_file: Path, controller: str, keys: RankKeys, log: Path
) -> LearnerHandle:
    """Return a data worker on this machine, not started."""
    arguments = worker_arguments(config_file, index, config.learner.listen_host, controller)
    return LearnerProcess([sys.executable, *arguments], log, WORKER_THREADS, keys)


class Launched:
    """Starts everything on a cluster's machines, by a launcher, which it asks for places."""

    starts, learner_here = True, False

    def __init__(self, config: Config, roles: Sequence[Role], launcher: Launcher, say: Say) -> None:
        self._launcher, self._say = launcher, say
        needs = checked(lambda: needs_of(config, roles, gpus=launcher.gpus > 0))
        places = checked(lambda: launcher.reserve(needs, say))
        self._places: Mapping[str, list[NodePlace]] = {
            key: [place for place in places if place.need.key == key]
            for key in (LEARNER, WORKERS, *roles)
        }
        self.config = _reached_at(config, launcher.host)

    def servers(self, role: Role, logs: Path, api_key: str | None) -> Sequence[ServerHandle]:
        """Return as Machines says."""
        config, section = self.config, section_of(self.config, role)
        file, env = RunDir(config.run.dir).resolved_config.absolute(), config.cluster.env
        given = None if section.api_key_env is not None else api_key

        def make(place: NodePlace, log: Path) -> ProcessSpec:
            return server_spec(file, role, place, log, given, env)

        return [
            RemoteServer(
                self._launcher,
                _with_port(place, section.base_port),
                make,
                logs / f"{log_name(role)}-{place.need.index}.log",
                self._say,
                f"{role}.base_port",
            )
            for place in self._places[role]
        ]

    def learner(
        self, config_file: Path, controller: str, keys: RankKeys, log: Path
    ) -> LearnerHandle | None:
        """Return as Machines says."""
        config = self.config
        env = {**config.cluster.env, RANK_VARIABLE: keys.text()}

        def make(places: Sequence[NodePlace], log: Path) -> Sequence[ProcessSpec]:
            return learner_specs(
                config_file.absolute(), config.learner, places, controller, log, env
            )

        return RemoteLearnerProcess(self._launcher, self._places[LEARNER], make, log, self._say)

    def worker(
        self, index: int, config_file: Path, controller: str, keys: RankKeys, log: Path
    ) -> LearnerHandle:
        """Return as Machines says."""
        env = {**self.config.cluster.env, RANK_VARIABLE: keys.text()}

        def make(places: Sequence[NodePlace], log: Path) -> Sequence[ProcessSpec]:
            return [worker_spec(config_file.absolute(), places[0], controller, log, env)]

        place = self._places[WORKERS][index]
        return RemoteLearnerProcess(self._launcher, [place], make, log, self._say)

    @property
    def line(self) -> str | None:
        """Returns the node of every process."""
        nodes = {
            key: " ".join(place.node for place in places) for key, places in self._places.items()
        }
        return "nodes: " + ", ".join(f"{key} {names}" for key, names in nodes.items() if names)


@contextmanager
def machines_of(config: Config, roles: Sequence[Role], say: Say) -> Iterator[Machines]:
    """Provide what the run's processes are started on. Raises UserError.

    Everything that was started must have been stopped when the block ends.
    """
    kind = config.cluster.type
    if kind == "local":
        yield Here(config, roles)
    elif kind == "external":
        yield Elsewhere(config, roles)
    else:
        launcher = checked(lambda: LAUNCHERS[kind](config))
        try:
            yield Launched(config, roles, launcher, say)
        finally:
            launcher.close()


def needs_of(config: Config, roles: Sequence[Role], *, gpus: bool) -> tuple[Need, ...]:
    """Return what each process of a run needs of its node, the learner's first.

    gpus: whether the cluster has any. ValueError: the learner's ranks do not fill its nodes.
    """
    learner = learner_needs(config.learner, config.cluster.ranks_per_node, gpus=gpus)
    servers = (
        Need(part.key, index, part.size if gpus else 0)
        for part in parts_of(config, roles)
        if part.key != LEARNER
        for index in range(part.groups)
    )
    workers = (Need(WORKERS, index, 0) for index in range(config.workers.count))
    return (*learner, *servers, *workers)


def _reached_at(config: Config, host: str) -> Config:
    """Return the configuration whose controller listens where the cluster's nodes reach it."""
    learner = config.learner
    if learner.listen_host != LOOPBACK:
        return config
    return config.model_copy(update={"learner": learner.model_copy(update={"listen_host": host})})


def _with_port(place: NodePlace, base_port: int) -> NodePlace:
    return replace(place, port=base_port + place.need.index) if base_port else place
