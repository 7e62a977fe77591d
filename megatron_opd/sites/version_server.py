"""Offers versions of the weights to sites and sends what they ask for, each at its own pace.

The store keeps the newest version, what a connected site is pulling, and what these are based on.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

from megatron_opd.sites.messages import FilePiece, MissingPiece, Offer, Want
from megatron_opd.sites.ports import SiteSender
from megatron_opd.sites.tasks import FirstFailure
from megatron_opd.sites.version_store import BadWant, VersionRemoved, VersionStore

MAX_WANTS = 16
"""Wants of one site that may wait; a site asks for a few ranges at once."""

OFFER_S = 1.0
"""Longest wait in seconds until sites are offered a new version; longer only with a full link."""


class VersionServer:
    """Serves the versions that were added to all sites that joined.

    Args:
        sender: sends to a site.

    num_bytes: of weights that were sent, by site.
    """

    def __init__(self, sender: SiteSender) -> None:
        self._sender = sender
        self._store = VersionStore()
        self._failure = FirstFailure()
        self._queues: dict[str, _SiteQueue] = {}
        self.num_bytes: Counter[str] = Counter()

    def add(self, directory: Path, name: str) -> None:
        """Take a version that was written. OSError, ValueError: see VersionStore.add.

        May be called in a thread.
        """
        self._store.add(directory, name)

    async def offer_newest(self) -> None:
        """Offer the version that was added last to every site.

        Returns once the offers are sent, or after OFFER_S: so it is known to a site before a prompt
        that comes after this, unless its link is full.
        """
        for queue in self._queues.values():
            queue.offer(self._store.offers[-1:])
        self._close_unused()
        sent = [asyncio.ensure_future(queue.offers_sent()) for queue in self._queues.values()]
        if sent:
            _, late = await asyncio.wait(sent, timeout=OFFER_S)
            for each in late:
                each.cancel()
            await asyncio.gather(*sent, return_exceptions=True)

    async def joined(self, site: str) -> None:
        """Offer all versions to a site that is new, or another process; newest first.

        Returns once the offers are sent, before which the site may be given no prompt: it samples
        the first one with the newest version.
        """
        queue = self._queues.get(site)
        if queue is None:
            queue = self._queues[site] = _SiteQueue(site, self._store, self._sender, self.num_bytes)
            queue.task.add_done_callback(self._failure.watch)
        queue.clear()
        queue.offer(self._store.offers[::-1])
        await queue.offers_sent()

    async def left(self, site: str) -> None:
        """Keep nothing for a site any longer; what it still asks for has no answer."""
        queue = self._queues.pop(site, None)
        if queue is not None:
            await queue.close()
        self._close_unused()

    def wants(self, site: str, want: Want) -> None:
        """Answer a site's Want in time. BadWant: no site would ask so."""
        self._store.check(want)
        queue = self._queues.get(site)
        if queue is not None:
            queue.want(want)

    async def failed(self) -> None:
        """Return never; raise why a site cannot be served."""
        await self._failure.wait()

    async def close(self) -> None:
        """Offer and send nothing of what there is any more; sites must join anew."""
        queues, self._queues = list(self._queues.values()), {}
        await asyncio.gather(*(queue.close() for queue in queues))
        self._store.close()

    def _close_unused(self) -> None:
        pulled = (queue.pulled for queue in self._queues.values())
        self._store.keep({name for name in pulled if name is not None})


class _SiteQueue:
    """Sends one site what it is offered and what it asks for, in a task of its own.

    task: ends by failing alone. pulled: the version that the site asked for last.
    """

    def __init__(
        self, site: str, store: VersionStore, sender: SiteSender, num_bytes: Counter[str]
    ) -> None:
        self._site, self._store, self._sender = site, store, sender
        self._num_bytes = num_bytes
        self._offers: deque[Offer] = deque()
        self._wants: deque[Want] = deque()
        self._due, self._offers_sent = asyncio.Event(), asyncio.Event()
        self.pulled: str | None = None
        self.task = asyncio.create_task(self._serve())

    def offer(self, offers: Sequence[Offer]) -> None:
        self._offers.extend(offers)
        self._offers_sent.clear()
        self._due.set()

    async def offers_sent(self) -> None:
        """Return once all offers are sent. Raises why they cannot be."""
        sent = asyncio.ensure_future(self._offers_sent.wait())
        await asyncio.wait({sent, self.task}, return_when=asyncio.FIRST_COMPLETED)
        sent.cancel()
        if self.task.done():
            self.task.result()

    def want(self, want: Want) -> None:
        if len(self._wants) >= MAX_WANTS:
            raise BadWant(f"more than {MAX_WANTS} ranges at once")
        self.pulled = want.name
        self._wants.append(want)
        self._due.set()

    def clear(self) -> None:
        """Forget what was asked for by a process that is gone."""
        self._offers.clear()
        self._wants.clear()
        self.pulled = None

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _serve(self) -> None:
        while True:
            if self._offers:
                await self._sender.send(self._site, self._offers.popleft())
                continue
            self._offers_sent.set()
            if self._wants:
                await self._answer(self._wants.popleft())
            else:
                self._due.clear()
                await self._due.wait()

    async def _answer(self, want: Want) -> None:
        """Send what a site asks for. OSError: the file cannot be read."""
        try:
            data = await asyncio.to_thread(self._store.read, want)
        except VersionRemoved:
            await self._sender.send(self._site, MissingPiece(want.name))
            return
        self._num_bytes[self._site] += len(data)
        piece = FilePiece(want.name, want.file, want.start)
        await self._sender.send(self._site, piece, (data,))
