"""Runs `opd site`: student servers and teachers of one sampler site, and its link to the learner.

What is started here ends with it, however it ends. The site's part of run.dir, sites/NAME, holds
the logs of its servers and a lock: a site has one process at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.checkpoint.run_lock import RunDirHeld, RunLock
from megatron_opd.config.roles import STUDENT, Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.errors import UserError, kept_traceback
from megatron_opd.fleet.clients import close_fleets, make_fleet
from megatron_opd.fleet.ends import closing_all
from megatron_opd.fleet.startup import ServedModel, join_role, start_all, take_in
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.inputs.environments import playing, turn_encoder
from megatron_opd.inputs.verifiers import judging
from megatron_opd.launch.stopping import stopped_by_signals
from megatron_opd.sites.keys import DIRECTORY, keys_file
from megatron_opd.sites.learner_watchdog import LearnerGone, LearnerTimeouts
from megatron_opd.sites.outbox import SiteOutbox
from megatron_opd.sites.sampling import NoSuchTeacher, SiteSampling, sampler_of
from megatron_opd.sites.site import Site
from megatron_opd.sites.site_ready import (
    SiteInput,
    SiteReady,
    get_site_ready,
    printed_by,
    read_input,
    wait_for_keys,
)
from megatron_opd.sites.site_weights import SiteWeights
from megatron_opd.weight_sync.loops import run_until_first_ends
from megatron_opd.wire.link.ends import LinkClient
from megatron_opd.wire.link.events import LinkRefused
from sglang_bridge import open_files
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import PortInUse, one_line
from sglang_bridge.server.launch import check_port

LOOK_S = 0.5
"""Wait in seconds between two looks whether fixed ports are free."""
PORTS_S = 20.0
"""Longest wait in seconds for fixed ports that servers of a killed process may still hold."""
LINGER_S = 2.0
"""Longest wait in seconds at the end for what is still to be sent."""
COUNTS = "counts.json"


def run_site(config: Config, name: str, named: Path | None) -> int:
    """Run site `name` until the learner's run has ended. Raises UserError, RunFailed.

    named: the file of its keys, where that is not in run.dir.
    """
    open_files.raise_limit()
    site = read_input(config, name)
    say = printed_by(name, Console(highlight=False))
    path, limit_s = named or keys_file(config.run.dir, name), config.student.startup_timeout_s
    keys = wait_for_keys(path, limit_s, say)
    directory = config.run.dir / DIRECTORY / name
    try:
        lock = RunLock.take(directory)
    except RunDirHeld as error:
        raise UserError(f"opd site {name}: {error}") from None
    except OSError as error:
        raise UserError(f"run.dir {directory} cannot be written: {error.strerror}") from None

    async def main() -> None:
        with stopped_by_signals():
            await ports_free(site.config, site.roles)
            ready = get_site_ready(site, keys, directory, say)
        await serve(ready)

    with lock:
        asyncio.run(main())
    return 0


async def serve(ready: SiteReady) -> None:
    """Start the servers, serve the learner, end the servers. Raises UserError, RunFailed."""
    ends, logs = ready.ends, ready.logs
    keep = partial(kept_traceback, log=logs / "site.log")
    async with closing_all(ends, ready.processes, f"; logs are in {logs}", keep) as closers:
        await ends.of(refusable(ready.input.name, _stages(ready, closers)))


async def _stages(ready: SiteReady, closers: AsyncExitStack) -> None:
    up = await bring_up(ready, closers)
    cause = await until_farewell(up)
    ready.say(f"the run has ended; samples sent: {up.site.counts()['samples_sent']}")
    if cause is not None:
        raise UserError(f"the learner's site ended this site's part: {one_line(cause)}")


@dataclass(frozen=True, slots=True)
class SiteUp:
    """Holds what a site serves its learner with: its servers are checked, the link is open."""

    supervisor: Supervisor
    site: Site


async def bring_up(ready: SiteReady, closers: AsyncExitStack) -> SiteUp:
    """Start the servers, wait until they answer, and open the link. Raises UserError.

    closers: takes what ends each part.
    """
    site, say, ends = ready.input, ready.say, ready.ends
    config, roles = site.config, site.roles
    ready.claimant.keep(ready.directory)
    fleets = {
        role: make_fleet(section_of(config, role), ready.urls[role], ready.api_keys[role])
        for role in roles
    }
    closers.push_async_callback(ends.closing(partial(close_fleets, fleets)))
    say(f"starting {len(ready.processes.servers)} SGLang servers; logs in {ready.logs}")
    await start_all(config, ready.processes, fleets, None, say)
    models = {role: _served_model(site, role) for role in roles}
    for role in roles:
        notes = await join_role(config, role, fleets[role], models[role], ready.claimant)
        say(*(f"note: {line}" for line in notes))

    async def readmit(role: Role, url: str) -> ServerClient:
        key = ready.api_keys[role]
        return await take_in(config, role, fleets[role], url, key, models[role], ready.claimant)

    supervisor = Supervisor(config, fleets, ready.processes, readmit, say)
    await closers.enter_async_context(judging(site.judge))
    await closers.enter_async_context(supervisor.watching())
    link = LinkClient(ready.keys.address, ready.keys.secret, ready.keys.learner, config.sites.link)
    closers.push_async_callback(ends.closing(partial(link.close, LINGER_S)))
    student = fleets[STUDENT]
    rollouts = Rollouts(config.schedule.in_flight, student)
    weights = SiteWeights.of(config, site.name, student, rollouts, link, supervisor, say)
    outbox = SiteOutbox(link, weights)
    encoder = turn_encoder(config, site.models)
    plays = await closers.enter_async_context(playing(config, encoder, None, fleets))
    sampler = sampler_of(config, student, site.models, rollouts, plays)
    sampling = SiteSampling.of(
        config, fleets, site.models, site.judge, sampler, weights, outbox, scores=site.scores
    )
    timeouts = LearnerTimeouts.of(config, ready.keys)
    loop = Site(link, site.hello, sampling, weights, outbox, timeouts, say)

    def write_counts() -> None:
        write_synced(ready.directory / COUNTS, json.dumps(loop.counts(), indent=1))

    closers.push_async_callback(ends.closing(write_counts))
    return SiteUp(supervisor, loop)


def _served_model(site: SiteInput, role: Role) -> ServedModel:
    """Return what a role's servers must serve."""
    models = site.models.models
    trained = models.student.spec if role == STUDENT else None
    return ServedModel(models.served[role].vocab_size, site.models.ends[role], trained)


async def until_farewell(up: SiteUp) -> str | None:
    """Serve until the learner says farewell; return why, None: the run has ended well."""
    causes: list[str | None] = []

    async def serve() -> None:
        causes.append(await up.site.serve())

    async def lost() -> None:
        raise await up.supervisor.failed()

    try:
        await run_until_first_ends(serve(), lost())
    except asyncio.CancelledError:
        await up.site.leave()
        raise
    (cause,) = causes
    return cause


async def refusable(name: str, work: Awaitable[None]) -> None:
    """Await work; what the learner's site says to this one's user is a UserError."""
    try:
        await work
    except LinkRefused as error:
        raise UserError(f"the learner's site refuses this site: {error}") from None
    except (NoSuchTeacher, LearnerGone) as error:
        raise UserError(f"opd site {name}: {error}") from None


async def ports_free(config: Config, roles: Sequence[Role]) -> None:
    """Wait, not for long, for the servers of a process of this site that was killed to end."""
    sections = [section_of(config, role) for role in roles]
    fixed = [
        (section.host, section.base_port + index)
        for section in sections
        if section.base_port and not section.urls
        for index in range(section.servers)
    ]
    clock = asyncio.get_running_loop().time
    until_s = clock() + PORTS_S
    while any(_is_taken(host, port) for host, port in fixed):
        if clock() > until_s:
            return  # what starts the servers says which one
        await asyncio.sleep(LOOK_S)


def _is_taken(host: str, port: int) -> bool:
    try:
        check_port(host, port)
    except PortInUse:
        return True
    except OSError:
        pass  # no address of this machine: what starts the servers says so
    return False
