"""Makes the second stage of a run: servers, learner and data workers are up and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from megatron_opd.config.roles import STUDENT, Role, answering, section_of
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.environments.playing import Playing
from megatron_opd.evaluation.summary import summary_of
from megatron_opd.fleet.admission import ServerAdmission
from megatron_opd.fleet.clients import close_fleets, make_fleet
from megatron_opd.fleet.elastic import Elastic
from megatron_opd.fleet.ends import Close
from megatron_opd.fleet.guards import RunGuard, make_guard, while_alive
from megatron_opd.fleet.startup import ServedModel, all_up, join_role, start_all, watch_elsewhere
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.inputs.environments import playing
from megatron_opd.inputs.teachers import check_teachers
from megatron_opd.inputs.verifiers import judging
from megatron_opd.launch.data_workers import DataWorkers
from megatron_opd.launch.readiness import StartingPart
from megatron_opd.run.evaluations import evaluations_before
from megatron_opd.run.own_servers import OwnServers
from megatron_opd.run.resume import state_of
from megatron_opd.run.stages import Ready, SampleSource, Up
from megatron_opd.sites.learner_side import SitesOfRun
from megatron_opd.transport.frames import largest_frame_bytes
from megatron_opd.transport.samples import FRAMES
from sglang_bridge.fleet import Fleet

Fleets = Mapping[Role, Fleet]
Closed = Callable[[Close], None]
"""Takes what ends a part, to be called when the run ends."""


async def bring_up(ready: Ready, closers: AsyncExitStack, watches: AsyncExitStack) -> Up:
    """Start what is to be started, wait for everything, and check it. Raises UserError, PartGone.

    closers: takes what ends each part. watches: takes what ends before any part does.
    """
    config, say = ready.config, ready.say

    def closed(close: Close) -> None:
        closers.push_async_callback(ready.ends.closing(close))

    fleets = _fleets_of(ready)
    closed(partial(close_fleets, fleets))
    # it ends after the last evaluation has
    trajectories = playing(config, ready.prepared.turns, ready.prepared.user, fleets)
    plays = await closers.enter_async_context(trajectories)
    evaluations = evaluations_before(config, ready.prepared, fleets, say, plays)
    ready.summary.follow("evaluations before", lambda: summary_of(evaluations, None))
    say(*(f"note: {line}" for line in ready.prepared.notes))
    if ready.machines.starts:
        await _start_and_connect(ready, fleets)
    else:
        await _wait_for_others(ready, fleets)
    pool = await _start_workers(ready, closed)
    say(f"everything is up after {time.monotonic() - ready.started_s:.0f} s")
    admission = ServerAdmission(
        config, ready.prepared, fleets, ready.directory.claimant, ready.keys
    )
    supervisor = Supervisor(config, fleets, ready.processes, admission.readmit, say)
    await watches.enter_async_context(judging(ready.prepared.judge))
    await watches.enter_async_context(supervisor.watching())
    guard = make_guard(ready.processes, ready.memory, ready.remote, supervisor)
    checks = await _check_teachers(ready, fleets, guard)
    ready.directory.take_over()
    sampling = _sampling(ready, fleets, pool, supervisor, plays)
    elastic = Elastic(
        config, fleets, supervisor, ready.processes, admission.admit, sampling.remove_server, say
    )
    up = Up(fleets, pool, supervisor, elastic, guard, sampling, evaluations, checks, plays)
    ready.summary.follow("up", partial(_figures, ready, up))
    closed(lambda: sampling.close(elastic.outliving))
    return up


def _figures(ready: Ready, up: Up) -> dict[str, Any]:
    """Return the keys of summary.json on servers, sites and data workers."""
    lost = 0 if up.pool is None else up.pool.workers_lost
    refused = 0 if up.pool is None else up.pool.connections.refusals.count
    return {
        "teacher_checks": up.teacher_checks,
        "servers_lost": up.supervisor.lost,
        "servers_restarted": up.supervisor.restarted.total(),
        "servers_added": up.elastic.added,
        "servers_removed": up.elastic.removed,
        "samples_readmitted": sum(fleet.restarted for fleet in up.fleets.values()),
        "trajectories_resumed": up.sampling.resumed.resumed,
        "trajectories_begun_anew": up.sampling.resumed.begun_anew,
        "requests_timed_out": sum(fleet.timed_out for fleet in up.fleets.values()),
        "sites": up.sampling.summary(),
        "data_workers_lost": lost,
        "frames_refused": ready.remote.frames_refused + refused,
    }


# ------------------------------------------------------------ servers and learner


def _fleets_of(ready: Ready) -> dict[Role, Fleet]:
    config = ready.config
    fleets: dict[Role, Fleet] = {}
    for role in ready.roles:
        evaluators = config.evaluation.servers if role == STUDENT else 0
        urls, key = ready.urls[role], ready.keys[role]
        fleets[role] = make_fleet(section_of(config, role), urls, key, evaluators)
    return fleets


async def _start_and_connect(ready: Ready, fleets: Fleets) -> None:
    """Start the run's own servers and learner. Those elsewhere are asked first what they are."""
    config, processes, say = ready.config, ready.processes, ready.say
    there_before = [role for role in ready.roles if section_of(config, role).urls]
    for role in there_before:
        await join(ready, role, fleets[role])
    ready.directory.take_over()
    say(
        f"starting {len(processes.servers)} SGLang servers and a learner of "
        f"{config.learner.parallel.world_size} ranks; logs in {ready.run_dir.logs}"
    )
    if ready.machines.line is not None:
        say(ready.machines.line)
    await start_all(config, processes, fleets, ready.remote, say)
    for role in ready.roles:
        if role not in there_before:
            await join(ready, role, fleets[role])


async def _wait_for_others(ready: Ready, fleets: Fleets) -> None:
    """Wait for servers and learner started elsewhere, for at most startup_timeout_s."""
    config = ready.config
    ready.say(f"waiting for a learner: --controller {ready.remote.address}")
    limits = {role: section_of(config, role).startup_timeout_s for role in ready.roles}
    parts = {
        f"{role}.urls {' '.join(ready.urls[role])}": StartingPart(
            join(ready, role, fleets[role], limits[role]),
            watch_elsewhere(ready.processes, {role: fleets[role]}),
        )
        for role in ready.roles
    }
    longest_s = max(limits.values(), default=config.student.startup_timeout_s)
    await all_up(ready.remote, longest_s, parts, ready.say)


async def join(ready: Ready, role: Role, fleet: Fleet, wait_s: float = 0.0) -> None:
    """Ask a role's servers what they are, and claim them. Raises UserError."""
    model, claimant = ServedModel.of(ready.prepared, role), ready.directory.claimant
    used = ready.used(role)
    notes = await join_role(ready.config, role, fleet, model, claimant, wait_s, used=used)
    ready.say(*(f"note: {line}" for line in notes))


# ------------------------------------------------------------ what else there is


async def _start_workers(ready: Ready, closed: Closed) -> WorkerPool | None:
    """Start the data workers, if there are to be any, and wait for them."""
    config, spec = ready.config, ready.prepared.student.spec
    if not config.workers.count:
        return None
    ready.directory.take_over()
    experts = sum(spec.moe_layers) * spec.experts_per_token
    largest = largest_frame_bytes(config, spec.vocab_size, experts)
    keys, logs = ready.admission.keys, ready.run_dir.logs
    workers = DataWorkers(ready.machines, keys, FRAMES * largest, logs, ready.say)
    closed(workers.stop)
    workers.start(ready.run_dir.resolved_config)
    await workers.ready(config.student.startup_timeout_s)
    return workers.pool


async def _check_teachers(ready: Ready, fleets: Fleets, guard: RunGuard) -> list[str]:
    """Return what the teachers' scores of some passages say. Raises UserError, PartGone."""
    roles = answering(ready.config)
    if not all(role in fleets for role in roles.values()):  # they are at sites
        return []
    # a resumed student is not yet on its servers, and one that sleeps answers nothing
    awake = ready.resumed is None and not ready.config.schedule.time_shared
    students = fleets[STUDENT].clients if awake and STUDENT in fleets else ()
    clients = {
        name: students if role == STUDENT else fleets[role].clients for name, role in roles.items()
    }
    checks = check_teachers(ready.config, ready.prepared, clients, students=students)
    lines = await while_alive(guard, checks)
    ready.say(*lines)
    return lines


def _sampling(
    ready: Ready,
    fleets: Fleets,
    pool: WorkerPool | None,
    supervisor: Supervisor,
    plays: Playing | None,
) -> SampleSource:
    """Return what samples for the run. Raises UserError."""
    config, prepared, resumed = ready.config, ready.prepared, ready.resumed
    if config.sites.members:
        state = state_of(resumed)
        return SitesOfRun(config, prepared, ready.remote, fleets, state, ready.say)
    return OwnServers(ready, fleets, pool, supervisor.lose, plays)
