"""Declares what the sites' parts need of links: commands pass the real ones, tests pass fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_opd.sites.messages import ToSite
from megatron_opd.transport.samples import Frames
from megatron_opd.wire.link.counts import LinkCounts
from megatron_opd.wire.link.events import Event
from megatron_opd.wire.link.wire import URGENT


class SiteLink(Protocol):
    """Names the methods of link.ends.LinkClient that a site needs."""

    async def next(self) -> Event:
        """Return what happens next."""
        ...

    async def send(self, parts: Frames, lane: int = URGENT) -> None:
        """Send a message to the learner; waits while too much waits to be sent."""
        ...

    def counts(self) -> LinkCounts:
        """Return how the link does."""
        ...


class SiteLinks(Protocol):
    """Names the methods of link.ends.LinkServer that the learner's side needs."""

    async def next(self) -> Event:
        """Return what happens next."""
        ...

    async def send(self, peer: str, parts: Frames, lane: int = URGENT) -> None:
        """Send a message to a site; waits while too much waits to be sent."""
        ...

    def counts(self, peer: str) -> LinkCounts:
        """Return how the link to a site does."""
        ...


class SiteSender(Protocol):
    """Names the method of hub.Hub that sends versions: so it knows what a site was offered."""

    async def send(self, site: str, message: ToSite, frames: Sequence[bytes] = ()) -> None:
        """Send a record, and frames behind it, to a site; waits while its link is full."""
        ...
