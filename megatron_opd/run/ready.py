"""Makes the first stage of a run: input read, addresses known, nothing started."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.config.roles import Role, section_of
from megatron_opd.errors import checked
from megatron_opd.fleet.ends import FirstCause
from megatron_opd.inputs.kept_data import KeptData, data_now
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.launch.keys import role_key
from megatron_opd.launch.machines import Machines
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.stopping import Stopping
from megatron_opd.metrics.memory import PeakMemory
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.types import Accounting
from megatron_opd.output import print_lines
from megatron_opd.run.directory import OwnedDirectory
from megatron_opd.run.first_update import NOT_JUDGED
from megatron_opd.run.resume import Resumption, resumed_figures
from megatron_opd.run.stages import Ready
from megatron_opd.run.summary import RunSummary
from megatron_opd.transport.remote_learner import Admission, RemoteLearner

NOT_STARTED = Accounting(
    updates=0, version=0, admitted=0, consumed=0, dropped={}, in_flight=0, interrupted=False
)


def get_ready(
    machines: Machines,
    prepared: Prepared,
    admission: Admission,
    roles: Sequence[Role],
    console: Console,
    resumed: Resumption | None = None,
) -> Ready:
    """Return the first stage; call inside the event loop. UserError: a port cannot be used."""
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
    ready = Ready(
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
    ready.summary.follow("ready", partial(_figures, ready))
    return ready


def _figures(ready: Ready) -> dict[str, Any]:
    """Return the keys of summary.json for a run of which nothing has begun."""
    bound = ready.config.staleness_bound
    return {
        **summarise(ready.new_totals(), NOT_STARTED, ready.wall_s(), bound),
        **NOT_JUDGED,
        **resumed_figures(ready.resumed),
        "teacher_checks": [],
        "servers_lost": {},
        "servers_restarted": 0,
        "servers_added": [],
        "servers_removed": [],
        "learner_restarts": 0,
        "updates_rolled_back": 0,
        "samples_readmitted": 0,
        "trajectories_resumed": 0,
        "trajectories_begun_anew": 0,
        "requests_timed_out": 0,
        "sites": None,
        "data_workers_lost": 0,
        "frames_refused": ready.remote.frames_refused,
        "prompts_skipped": ready.prepared.prompts_skipped,
        "data_epochs": ready.prepared.prompts.epochs_at(0),
    }
