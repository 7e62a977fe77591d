"""Runs `opd site`: student servers and teachers of one sampler site, and its link to the learner.

What is started here ends with it, however it ends. The site's part of run.dir, sites/NAME, holds
the logs of its servers and a lock: a site has one process at a time.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from megatron_opd.checkpoint.claimant import claimant_of
from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.checkpoint.run_lock import RunDirHeld, RunLock
from megatron_opd.config.roles import STUDENT, Role, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.data.judge import Judge
from megatron_opd.errors import UserError, checked, kept_traceback
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.fleet.ends import FirstCause
from megatron_opd.fleet.startup import ServedModel, join_role, take_in
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.inputs.models import CheckedModels, check_models
from megatron_opd.inputs.prepare import ending_of, make_judge
from megatron_opd.inputs.verifiers import check_isolation, judging
from megatron_opd.launch.joining import all_of
from megatron_opd.launch.keys import role_key
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.servers import server_processes
from megatron_opd.launch.stopping import stopped_by_signals
from megatron_opd.output import print_lines
from megatron_opd.sites.absence import LearnerGone, Patience
from megatron_opd.sites.build import SiteParts, make_parts, placement_of_site
from megatron_opd.sites.config import member, site_config
from megatron_opd.sites.facts import hello_of
from megatron_opd.sites.keys import DIRECTORY, SiteKeys, keys_file
from megatron_opd.sites.messages import SiteHello
from megatron_opd.sites.sampling import NoSuchTeacher
from megatron_opd.sites.together import together
from megatron_opd.wire.link.ends import LinkClient
from megatron_opd.wire.link.events import LinkRefused
from sglang_bridge import open_files
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import PortInUse, one_line
from sglang_bridge.fleet import Fleet
from sglang_bridge.server.launch import check_port

LOOK_S = 0.5
"""Wait in seconds between two looks for the file of keys."""
LINGER_S = 2.0
"""Longest wait in seconds at the end for what is still to be sent."""
PORTS_S = 20.0
"""Longest wait in seconds for fixed ports that servers of a killed process may still hold."""
COUNTS = "counts.json"


def run_site(config: Config, name: str, named: Path | None) -> int:
    """Run site `name` until the learner's run has ended. Raises UserError, RunFailed.

    named: the file of its keys, where that is not in run.dir.
    """
    open_files.raise_limit()
    site = member(config, name)
    own = site_config(config, name)
    check_isolation(own)
    models = check_models(own, teachers=site.scores)
    assert models.tokenizer is not None, "only a plan may lack it"
    tokenizer = models.tokenizer
    judge = checked(lambda: make_judge(own, tokenizer)) if site.scores else None
    run = SiteRun(own, name, models, judge, scores=site.scores)
    keys = run.wait_for_keys(named or keys_file(config.run.dir, name))
    directory = config.run.dir / DIRECTORY / name
    try:
        lock = RunLock.take(directory)
    except RunDirHeld as error:
        raise UserError(f"opd site {name}: {error}") from None
    except OSError as error:
        raise UserError(f"run.dir {directory} cannot be written: {error.strerror}") from None
    with lock:
        asyncio.run(run.main(keys, directory))
    return 0


class SiteRun:
    """Performs one start of a site."""

    def __init__(
        self,
        config: Config,
        name: str,
        models: CheckedModels,
        judge: Judge | None,
        *,
        scores: bool,
    ) -> None:
        self._config, self._name = config, name
        self._models, self._judge, self._scores = models, judge, scores
        self._console = Console(highlight=False)
        teachers = tuple(teacher_roles(config).values()) if scores else ()
        self._roles: tuple[Role, ...] = (STUDENT, *teachers)
        self._processes = Processes([], None)
        self.ends = FirstCause(lambda: self._processes.watched())
        self._fleets: dict[Role, Fleet] = {}

    def hello(self) -> SiteHello:
        """Return what the site says of itself. Raises UserError."""
        vocab_size, ending = self._models.student.vocab_size, ending_of(self._config, self._models)
        return checked(
            lambda: hello_of(self._config, self._name, vocab_size, ending, scores=self._scores)
        )

    def wait_for_keys(self, path: Path) -> SiteKeys:
        """Return the site's keys once the run has written them. UserError: it does not in time."""
        limit_s = self._config.student.startup_timeout_s
        until_s, said = time.monotonic() + limit_s, False
        while (keys := checked(lambda: SiteKeys.read(path))) is None:
            if not said:
                self._say(f"waiting for the keys of the site in {path}, which opd run writes")
                said = True
            if time.monotonic() > until_s:
                raise UserError(
                    f"{path} is not there after student.startup_timeout_s = {limit_s:g} s: start "
                    "opd run with this configuration, or copy the file here and name it with --keys"
                )
            time.sleep(LOOK_S)
        return keys

    async def main(self, keys: SiteKeys, directory: Path) -> None:
        """Start the servers, serve the learner, end the servers. Raises UserError, RunFailed."""
        logs = directory / "logs"
        try:
            try:
                with stopped_by_signals():
                    await self.ends.of(self._refusable(self._run(keys, logs, directory / COUNTS)))
            finally:
                async with AsyncExitStack() as closers:
                    closers.push_async_callback(self.ends.closing(self._processes.stop))
                    closers.push_async_callback(self.ends.closing(self._close_fleets))
        except BaseException as last:
            keep = partial(kept_traceback, log=logs / "site.log")
            raise self.ends.end(last, f"; logs are in {logs}", keep) from last

    async def _close_fleets(self) -> None:
        await asyncio.gather(*(fleet.close() for fleet in self._fleets.values()))

    async def _run(self, keys: SiteKeys, logs: Path, counts: Path) -> None:
        self._claimant = claimant_of(f"opd site {self._name} in", counts.parent)
        self._claimant.keep(counts.parent)
        await self._start(logs)
        supervisor = Supervisor(
            self._config, self._fleets, self._processes, self._take_in, self._say
        )
        hello = self.hello()
        async with judging(self._judge), supervisor.watching():
            link = LinkClient(keys.address, keys.secret, keys.learner, self._config.sites.link)
            owner = f"{socket.gethostname()}:{counts.parent.absolute()}"
            parts = make_parts(
                *(self._config, self._name, self._fleets, self._models, self._judge),
                *(hello, link, owner, self._patience(keys), supervisor.lose, self._say),
            )

            async def leave() -> None:
                await link.close(LINGER_S)

            async def count() -> None:
                write_synced(counts, json.dumps(parts.counts(link), indent=1))

            async with AsyncExitStack() as closers:
                closers.push_async_callback(self.ends.closing(leave))
                closers.push_async_callback(self.ends.closing(count))
                await self.ends.of(self._refusable(self._serve(parts, supervisor)))

    async def _refusable(self, work: Awaitable[None]) -> None:
        """Await work; what the learner's site says to this one's user is a UserError."""
        try:
            await work
        except LinkRefused as error:
            raise UserError(f"the learner's site refuses this site: {error}") from None
        except (NoSuchTeacher, LearnerGone) as error:
            raise UserError(f"opd site {self._name}: {error}") from None

    def _patience(self, keys: SiteKeys) -> Patience:
        first_s = self._config.student.startup_timeout_s
        return Patience(keys.address, first_s, self._config.sites.learner_gone_after_s)

    async def _serve(self, parts: SiteParts, supervisor: Supervisor) -> None:
        """Serve until the learner says farewell. UserError: with a cause."""
        causes: list[str | None] = []

        async def serve() -> None:
            causes.append(await parts.site.serve())

        async def lost() -> None:
            raise await supervisor.failed()

        try:
            await together(serve(), lost())
        except asyncio.CancelledError:
            await parts.site.leave()
            raise
        (cause,) = causes
        self._say(f"the run has ended; samples sent: {parts.sampling.delivered}")
        if cause is not None:
            raise UserError(f"the learner's site ended this site's part: {one_line(cause)}")

    async def _start(self, logs: Path) -> None:
        """Start all servers and wait until they answer. Raises UserError."""
        config, roles = self._config, self._roles
        keys = {role: role_key(section_of(config, role), role) for role in roles}
        placement = placement_of_site(config, roles)
        await self._ports_are_free()
        started = {
            role: server_processes(config, role, logs, keys[role], placement) for role in roles
        }
        servers = [server for each in started.values() for server in each]
        self._processes = Processes(servers, None)
        self._keys: Mapping[Role, str | None] = keys
        self._say(f"starting {len(servers)} SGLang servers; logs in {logs}")
        self._processes.start()
        startup_s = max(section_of(config, role).startup_timeout_s for role in roles)
        await all_of(self._processes.parts(startup_s), self._say)
        for role in roles:
            section = section_of(config, role)
            urls = section.urls or tuple(server.url for server in started[role])
            fleet = self._fleets[role] = make_fleet(section, urls, keys[role])
            notes = await join_role(config, role, fleet, self._served(role), self._claimant)
            self._say(*(f"note: {line}" for line in notes))

    async def _ports_are_free(self) -> None:
        """Wait, not for long, for the servers of a process of this site that was killed to end."""
        sections = [section_of(self._config, role) for role in self._roles]
        fixed = [
            (section.host, section.base_port + index)
            for section in sections
            if section.base_port and not section.urls
            for index in range(section.servers)
        ]
        until_s = time.monotonic() + PORTS_S
        while any(_is_taken(host, port) for host, port in fixed):
            if time.monotonic() > until_s:
                return  # what starts the servers says which one
            await asyncio.sleep(LOOK_S)

    async def _take_in(self, role: Role, url: str) -> ServerClient:
        """Let a server in that was lost. BridgeError, UserError: it is not what it was."""
        key = self._keys[role]
        model = self._served(role)
        return await take_in(
            self._config, role, self._fleets[role], url, key, model, self._claimant
        )

    def _served(self, role: Role) -> ServedModel:
        model = self._models.models[role]
        trained = model.spec if role == STUDENT else None
        return ServedModel(model.vocab_size, self._models.ends[role], trained)

    def _say(self, *lines: str) -> None:
        print_lines(self._console, *(f"{self._name}: {line}" for line in lines))


def _is_taken(host: str, port: int) -> bool:
    try:
        check_port(host, port)
    except PortInUse:
        return True
    except OSError:
        pass  # no address of this machine: what starts the servers says so
    return False
