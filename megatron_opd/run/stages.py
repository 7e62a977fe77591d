"""Names the stages of a run: frozen records, each of which exists whole or not at all.

Ready (ready.py): input read, directory locked, addresses known; nothing is started. Then Up
(start.py): servers, learner and data workers are there and checked. Then, once for each learner,
Attempt (attempt.py): what makes updates with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.config.roles import STUDENT, Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.controller.ports import Engines, Guard, WeightSyncer
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.environments.playing import Playing
from megatron_opd.evaluation.evaluations import Evaluations
from megatron_opd.fleet.elastic import Elastic
from megatron_opd.fleet.ends import FirstCause
from megatron_opd.fleet.guards import RunGuard
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.inputs.kept_data import KeptData
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.launch.machines import Machines
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.stopping import Stopping
from megatron_opd.metrics.memory import PeakMemory
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.output import print_lines
from megatron_opd.rollout.resumed import ResumeCounts
from megatron_opd.run.directory import OwnedDirectory
from megatron_opd.run.resume import Resumption
from megatron_opd.run.summary import RunSummary
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.weight_sync.live import LiveVersion
from sglang_bridge.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Ready:
    """Holds what a run begins with.

    config: as the machines have it. resumed: where it continues; None: from the beginning. keys,
    urls: of every role's servers. processes: started by none yet. summary, stopping, ends: what the
    run says at its end, what ends it, and why it ended.
    """

    config: Config
    roles: tuple[Role, ...]
    machines: Machines
    prepared: Prepared
    admission: Admission
    resumed: Resumption | None
    directory: OwnedDirectory
    keys: Mapping[Role, str | None]
    urls: Mapping[Role, tuple[str, ...]]
    remote: RemoteLearner
    processes: Processes
    data: KeptData
    memory: PeakMemory
    summary: RunSummary
    stopping: Stopping
    ends: FirstCause
    console: Console
    started_s: float

    @property
    def run_dir(self) -> RunDir:
        """Returns the paths of what the run writes."""
        return RunDir(self.config.run.dir)

    @property
    def samplers(self) -> tuple[str, ...]:
        """Returns what samples: sites, or servers, the first of which may be for evaluations."""
        sites = tuple(self.config.sites.members)
        return sites or self.urls[STUDENT][self.config.evaluation.servers :]

    def say(self, *lines: str) -> None:
        """Print lines for the user."""
        print_lines(self.console, *lines)

    def used(self, role: Role) -> bool:
        """Return whether an earlier controller of this run used the role's servers."""
        return self.resumed is not None and bool(section_of(self.config, role).urls)

    def new_totals(self) -> RunTotals:
        """Return totals that nothing was counted into but the memory of this process."""
        credit = self.config.estimator.credit
        totals = RunTotals(self.samplers, self.config.rollout.group_size, credit)
        totals.memory = self.memory
        return totals

    def wall_s(self) -> float:
        """Return the seconds that the user has waited, in this process and those before it."""
        earlier = 0.0 if self.resumed is None else self.resumed.extras["wall_s"]
        return time.monotonic() - self.started_s + earlier


class SampleSource(Protocol):
    """Names what a run needs of what samples for it."""

    @property
    def weights(self) -> WeightSyncer:
        """Returns what sends the learner's weights there."""
        ...

    @property
    def resumed(self) -> ResumeCounts:
        """Returns how many trajectories went on after an interruption."""
        ...

    def teacher_versions(self) -> Mapping[Role, LiveVersion]:
        """Return the versions of the servers that score and whose weights the learner sends."""
        ...

    async def open(self, guard: Guard, supervisor: Supervisor) -> None:
        """Connect the learner and what samples, once before the first update."""
        ...

    async def wait_ready(self, guard: Guard) -> None:
        """Wait until something is there that samples. Raises UserError."""
        ...

    def engines(self) -> Engines:
        """Return what samples and scores for one controller."""
        ...

    async def start_over(self, state: ControllerState) -> None:
        """Prepare for another learner, which continues from `state`. Raises WeightSyncFailed."""
        ...

    async def remove_server(self, url: str, drop: Callable[[], None]) -> str | None:
        """Let a student server go, and `drop` it; see WeightSync.remove_server."""
        ...

    async def farewell(self, outliving: Collection[str]) -> None:
        """Take leave after the last update. outliving: servers that stay when the run ends."""
        ...

    async def farewell_received(self) -> None:
        """Wait until the farewell has arrived everywhere."""
        ...

    async def close(self, outliving: Collection[str]) -> None:
        """End the connections, however the run ended."""
        ...

    def columns(self) -> Mapping[str, Any]:
        """Return columns for the row of an update."""
        ...

    def summary(self) -> Mapping[str, Any] | None:
        """Return what summary.json says of sites; None: there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Up:
    """Holds what a run's updates are made with; the run's directory is its own from here on.

    pool: what the data workers do for the run; None: there are none. evaluations: those before the
    first update. playing: runs trajectories; None: prompts are answered once.
    """

    fleets: Mapping[Role, Fleet]
    pool: WorkerPool | None
    supervisor: Supervisor
    elastic: Elastic
    guard: RunGuard
    sampling: SampleSource
    evaluations: Evaluations
    teacher_checks: list[str]
    playing: Playing | None = None
