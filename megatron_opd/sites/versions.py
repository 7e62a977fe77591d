"""Writes every version of the weights to disk and lets sites pull it, each at its own pace.

The learner's side of the versions' way over the link. A weight sync is done once its version is
written, hashed and on the shelf; no site is waited for. The shelf keeps the newest version, what a
connected site is pulling, and what these are based on.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence

from megatron_opd.config.schema import Config
from megatron_opd.metrics.types import Phase, WeightSyncReport
from megatron_opd.records.types import LearnerTurn
from megatron_opd.sites.messages import FilePiece, MissingPiece, Offer, Want
from megatron_opd.sites.ports import Send
from megatron_opd.sites.shelf import BadWant, NotOnShelf, Shelf
from megatron_opd.sites.together import Failure
from megatron_opd.weight_sync.disk_messages import DiskRefused, Open, Write, Written, decode, encode
from megatron_opd.weight_sync.session import ALONE
from megatron_opd.weight_sync.transport import AskLearner
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.weights.manifest import version_name

logger = logging.getLogger(__name__)

MAX_WANTS = 16
"""Wants of one site that may wait; a site asks for a few ranges at once."""

TELL_S = 1.0
"""Longest wait in seconds until sites are told of a new version; longer only with a full link."""


class SiteVersions:
    """Writes versions and serves them; implements controller.ports.WeightSyncer.

    Args:
        ask: hands a request to the learner's part of the disk transport.
        config: the run's.
        send: to a site.

    num_bytes: of weights that were sent, by site.
    """

    def __init__(self, ask: AskLearner, config: Config, send: Send) -> None:
        self._ask, self._config, self._send = ask, config, send
        self._shelf = Shelf()
        self._stream = ""
        self._num_written = 0
        self._newest: str | None = None
        self._is_sound = False  # whether the next version may hold changes of the last one
        self._failure = Failure()
        self._desks: dict[str, _Desk] = {}
        self.num_bytes: Counter[str] = Counter()

    # ------------------------------------------------------------ the controller's weight sync

    async def open(self, *, used: bool = False) -> None:
        """Let the learner make the directory of versions. WeightSyncFailed: it cannot.

        used: means nothing here: sites of an earlier controller take what this one offers.
        """
        config = self._config
        self._stream = f"run-{uuid.uuid4().hex[:12]}"
        owner = f"{socket.gethostname()}:{config.run.dir.absolute()}"
        await self._ask_learner(Open(self._stream, owner, config.student.dtype))
        self._is_sound = False

    async def sync(self, version: int, turn: LearnerTurn = ALONE) -> WeightSyncReport:
        """Write `version` and offer it to all sites. WeightSyncFailed: it cannot be written."""
        tries = self._config.weight_sync.tries
        for number in range(1, tries + 1):
            try:
                report = await self._written(version, number)
                break
            except WeightSyncFailed as error:
                logger.warning("weight sync %d, try %d: %s", version, number, error)
                self._is_sound = False
                if number == tries:
                    raise
        for desk in self._desks.values():
            desk.offer(self._shelf.offers[-1:])
        self._let_go()
        # so that it is known to a site before a prompt that comes after this; a full link is not
        # waited for
        told = [asyncio.ensure_future(desk.told()) for desk in self._desks.values()]
        if told:
            _, late = await asyncio.wait(told, timeout=TELL_S)
            for each in late:
                each.cancel()
            await asyncio.gather(*told, return_exceptions=True)
        return report

    async def make_room(self) -> None:
        """Return at once: the learner shares nothing with the sites."""

    async def stranded(self) -> None:
        """Return never: a site has weights from its start on."""
        await self._failure.wait()

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Return never: a site that comes pulls what is on the shelf. Raises what fails there."""
        await self._failure.wait()

    async def start_over(self) -> None:
        """Prepare for another learner. WeightSyncFailed: it cannot make its directory.

        Nothing that the one before it has written is offered or sent any more; sites must join
        anew.
        """
        await self.close()
        self._newest = None
        await self.open()

    async def close(self) -> None:
        """Let go of all versions, which the learner deletes at its end."""
        desks, self._desks = list(self._desks.values()), {}
        await asyncio.gather(*(desk.close() for desk in desks))
        self._shelf.close()

    async def _written(self, version: int, tries: int) -> WeightSyncReport:
        clock = asyncio.get_running_loop().time
        settings = self._config.weight_sync
        assert settings.directory is not None, "the configuration requires it"
        name = version_name(self._num_written, version)
        self._num_written += 1
        began_s = clock()
        written = Write(name, version, not self._is_sound, self._newest)
        num_bytes = await self._ask_learner(written)
        wrote_s = clock()
        directory = settings.directory.absolute() / self._stream
        try:
            await asyncio.to_thread(self._shelf.put, directory, name)
        except (OSError, ValueError) as error:
            raise WeightSyncFailed(f"{directory / name}: {error}") from error
        self._newest, self._is_sound = name, True
        done_s = clock()
        phases = (Phase("stage", began_s, wrote_s), Phase("offer", wrote_s, done_s))
        return WeightSyncReport(version, phases, num_bytes, done_s, done_s, tries)

    async def _ask_learner(self, request: Open | Write) -> int:
        """Return the bytes that were written. WeightSyncFailed: it was refused."""
        answer = decode(await self._ask(encode(request)))
        if isinstance(answer, DiskRefused):
            raise WeightSyncFailed(f"the learner: {answer.cause}")
        assert isinstance(answer, Written)
        return answer.num_bytes

    # ------------------------------------------------------------ the sites

    async def joined(self, site: str) -> None:
        """Offer all that is on the shelf to a site that is new, or another process; newest first.

        Returns once the offers are sent, before which the site may be given no prompt: it samples
        the first one with the newest version.
        """
        desk = self._desks.get(site)
        if desk is None:
            desk = self._desks[site] = _Desk(site, self._shelf, self._send, self.num_bytes)
            desk.task.add_done_callback(self._failure.watch)
        desk.forget()
        desk.offer(self._shelf.offers[::-1])
        await desk.told()

    async def left(self, site: str) -> None:
        """Keep nothing for a site any longer; what it still asks for has no answer."""
        desk = self._desks.pop(site, None)
        if desk is not None:
            await desk.close()
        self._let_go()

    def wants(self, site: str, want: Want) -> None:
        """Answer a site's Want in time. BadWant: no site would ask so."""
        self._shelf.check(want)
        desk = self._desks.get(site)
        if desk is not None:
            desk.want(want)

    def _let_go(self) -> None:
        pulled = (desk.pulls for desk in self._desks.values())
        self._shelf.keep({name for name in pulled if name is not None})


class _Desk:
    """Sends one site what it is offered and what it asks for, in a task of its own.

    task: ends by failing alone. pulls: the version that the site asked for last.
    """

    def __init__(self, site: str, shelf: Shelf, send: Send, num_bytes: Counter[str]) -> None:
        self._site, self._shelf, self._send, self._num_bytes = site, shelf, send, num_bytes
        self._offers: deque[Offer] = deque()
        self._wants: deque[Want] = deque()
        self._due, self._told = asyncio.Event(), asyncio.Event()
        self.pulls: str | None = None
        self.task = asyncio.create_task(self._serve())

    def offer(self, offers: Sequence[Offer]) -> None:
        self._offers.extend(offers)
        self._told.clear()
        self._due.set()

    async def told(self) -> None:
        """Return once all offers are sent. Raises why they cannot be."""
        told = asyncio.ensure_future(self._told.wait())
        await asyncio.wait({told, self.task}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if self.task.done():
            self.task.result()

    def want(self, want: Want) -> None:
        if len(self._wants) >= MAX_WANTS:
            raise BadWant(f"more than {MAX_WANTS} ranges at once")
        self.pulls = want.name
        self._wants.append(want)
        self._due.set()

    def forget(self) -> None:
        """Forget what was asked for by a process that is gone."""
        self._offers.clear()
        self._wants.clear()
        self.pulls = None

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _serve(self) -> None:
        while True:
            if self._offers:
                await self._send(self._site, self._offers.popleft(), ())
                continue
            self._told.set()
            if self._wants:
                await self._answer(self._wants.popleft())
            else:
                self._due.clear()
                await self._due.wait()

    async def _answer(self, want: Want) -> None:
        """Send what a site asks for. OSError: the file cannot be read."""
        try:
            data = await asyncio.to_thread(self._shelf.read, want)
        except NotOnShelf:
            await self._send(self._site, MissingPiece(want.name), ())
            return
        self._num_bytes[self._site] += len(data)
        await self._send(self._site, FilePiece(want.name, want.file, want.start), (data,))
