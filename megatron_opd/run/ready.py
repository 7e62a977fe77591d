"""The first stage of a run: input read, directory locked, addresses known; nothing is started."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console

from megatron_opd.checkpoint.claimant import claimant_of
from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.checkpoint.run_dir import RunDir, prepare_run_dir
from megatron_opd.config.roles import STUDENT, Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.site_bounds import staleness_bound
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.data.template import RunTemplate
from megatron_opd.errors import checked, kept_traceback
from megatron_opd.fleet.ends import FirstCause
from megatron_opd.inputs.prepare import Prepared
from megatron_opd.inputs.prompt_order import KeptData, data_now
from megatron_opd.launch.keys import role_key
from megatron_opd.launch.machines import Machines
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.stopping import Stopping
from megatron_opd.metrics.memory import PeakMemory
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting
from megatron_opd.run.evaluations import rows_of
from megatron_opd.run.first_update import NOT_JUDGED
from megatron_opd.run.resume import Resumption, reopen_run_dir
from megatron_opd.run.summary import RunSummary
from megatron_opd.transport.remote_learner import Admission, RemoteLearner

NOT_STARTED = Accounting(
    updates=0, version=0, admitted=0, consumed=0, dropped={}, in_flight=0, interrupted=False
)


def print_lines(console: Console, *lines: str) -> None:
    """Print lines for the user."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def state_of(resumed: Resumption | None) -> ControllerState:
    """Return what a controller continues from; None: from the beginning."""
    return NOTHING_YET if resumed is None else resumed.state


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

    @classmethod
    def of(
        cls,
        machines: Machines,
        prepared: Prepared,
        admission: Admission,
        roles: Sequence[Role],
        console: Console,
        resumed: Resumption | None = None,
    ) -> Ready:
        """Make it; call inside the event loop. UserError: learner.listen_port cannot be used."""
        config, say = machines.config, partial(print_lines, console)
        run_dir, kept = RunDir(config.run.dir), admission.keys
        keys = {role: role_key(section_of(config, role), role, kept.servers) for role in roles}
        servers = {role: machines.servers(role, run_dir.logs, keys[role]) for role in roles}
        sums = data_now(config) if resumed is None else resumed.begun.sums
        remote = checked(lambda: RemoteLearner(config, admission))
        learner = machines.learner(
            run_dir.resolved_config, remote.address, kept.ranks, run_dir.logs / "learner.log"
        )
        processes = Processes([each for role in roles for each in servers[role]], learner)
        ready = cls(
            config=config,
            roles=tuple(roles),
            machines=machines,
            prepared=prepared,
            admission=admission,
            resumed=resumed,
            directory=OwnedDirectory(config, prepared.template, resumed, say),
            keys=keys,
            urls={
                role: section_of(config, role).urls or tuple(each.url for each in servers[role])
                for role in roles
            },
            remote=remote,
            processes=processes,
            data=KeptData(sums, prepared.shape),
            memory=PeakMemory(),
            summary=RunSummary(),
            stopping=Stopping(config.checkpoint.grace_s, say),
            ends=FirstCause(processes.watched),
            console=console,
            started_s=time.monotonic(),
        )
        ready.summary.follow(ready.figures)
        return ready

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
        totals = RunTotals(self.samplers, self.config.rollout.group_size)
        totals.memory = self.memory
        return totals

    def wall_s(self) -> float:
        """Return the seconds that the user has waited, in this process and those before it."""
        earlier = 0.0 if self.resumed is None else self.resumed.extras["wall_s"]
        return time.monotonic() - self.started_s + earlier

    def figures(self) -> dict[str, Any]:
        """Return the keys of summary.json for a run of which nothing has begun."""
        bound = staleness_bound(self.config)
        return {
            **summarise(self.new_totals(), NOT_STARTED, self.wall_s(), bound),
            **NOT_JUDGED,
            **resumed_figures(self.resumed),
            "teacher_checks": [],
            "servers_lost": {},
            "servers_restarted": 0,
            "servers_added": [],
            "servers_removed": [],
            "learner_restarts": 0,
            "updates_rolled_back": 0,
            "samples_readmitted": 0,
            "requests_timed_out": 0,
            "sites": None,
            "data_workers_lost": 0,
            "frames_refused": self.remote.frames_refused,
            "prompts_skipped": self.prepared.prompts_skipped,
            "data_epochs": self.prepared.prompts.epochs_at(0),
        }


def resumed_figures(resumed: Resumption | None) -> dict[str, Any]:
    """Return the keys of summary.json that say where a run continued, and with what changed."""
    if resumed is None:
        return {"resumed_at_updates": [], "resumed_with_changes": []}
    return {
        "resumed_at_updates": resumed_at(resumed),
        "resumed_with_changes": [asdict(change) for change in resumed.changes],
    }


def resumed_at(resumed: Resumption | None) -> list[int]:
    """Return the updates at which a run was continued, this time included."""
    if resumed is None:
        return []
    return [*resumed.extras["resumed_at_updates"], resumed.state.updates]


class OwnedDirectory:
    """Takes the run's directory over, once, when nothing can keep the run from beginning.

    taken: whether it is this run's; until then it may hold an earlier run, which stays as it is.
    claimant: this run, as it claims servers.
    """

    def __init__(
        self,
        config: Config,
        template: RunTemplate,
        resumed: Resumption | None,
        say: Callable[..., None],
    ) -> None:
        self._config, self._template = config, template
        self._resumed, self._say = resumed, say
        self.claimant = claimant_of("run", config.run.dir)
        self.taken = False

    def take_over(self) -> None:
        """Make the directory this run's, unless it is already. Raises UserError."""
        if self.taken:
            return
        config, resumed = self._config, self._resumed
        if resumed is None:
            run_dir = prepare_run_dir(config.run.dir, config)
        else:
            self._say(*resumed.notes)
            rows = rows_of(resumed.evaluations)
            run_dir = reopen_run_dir(config, resumed.state.updates, resumed.changes, rows)
        self.taken = True
        write_synced(run_dir.template, json.dumps(self._template.as_json()))
        self.claimant.keep(run_dir.path)

    def see_logs(self) -> str:
        """Return what follows a line that tells why the run failed."""
        return f"; logs are in {RunDir(self._config.run.dir).logs}" if self.taken else ""

    def keep_traceback(self, error: BaseException) -> str:
        """Keep a traceback; return where. Before the directory is this run's, the logs are not."""
        if not self.taken:
            traceback.print_exception(error)
            return "its traceback is above"
        return kept_traceback(error, RunDir(self._config.run.dir).logs / "controller.log")
