"""Holds what both kinds of end have: an inbox, and one group of tasks whose failure ends it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_opd.config.sites import LinkConfig
from megatron_opd.wire.link.events import Event, LinkRefused
from megatron_opd.wire.link.inbox import LinkInbox
from megatron_opd.wire.link.peer import Peer
from megatron_opd.wire.link.wire import PROCESS_BYTES

FLUSH_S = 0.01
"""Time between two looks whether everything has arrived, while an end closes."""


class End(ABC):
    """Serves as the base of both kinds; `process` names this start of it."""

    def __init__(self, settings: LinkConfig, workers: int, name: str) -> None:
        self._settings = settings
        self._inbox = LinkInbox()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._process = secrets.token_bytes(PROCESS_BYTES)
        self._beat_s = min(settings.heartbeat_s, settings.silence_s) / 4
        self._closed = False

    def _start(self, name: str) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)
        self._task.add_done_callback(self._ended)

    @abstractmethod
    async def _run(self) -> None: ...

    @abstractmethod
    def _close_sockets(self) -> None: ...

    @abstractmethod
    def _all_peers(self) -> Sequence[Peer]: ...

    async def next(self) -> Event:
        """Wait for the next event. LinkRefused: the link has ended for this process."""
        return await self._inbox.next()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._close_sockets()  # here, as a task that was cancelled before it began has run nothing
        self._inbox.fail(error or LinkRefused("the link is closed"))
        for peer in self._all_peers():
            peer.wake()

    async def close(self, linger_s: float = 0.0) -> None:
        """Close, once what waits has arrived, or after `linger_s`. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                while not self._task.done() and self._waits():  # noqa: ASYNC110  at its end only
                    await asyncio.sleep(FLUSH_S)
        self._task.cancel()
        await asyncio.wait([self._task])
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _waits(self) -> bool:
        # also for who is to connect again: its connection may have broken just now
        return any(peer.channel.peer and peer.channel.waiting_bytes for peer in self._all_peers())
