"""Declares what the learner's side of the sites needs: `cli` passes the real parts, tests fakes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from megatron_opd.sites.messages import ToSite, Want
from megatron_opd.transport.samples import Frames
from megatron_opd.wire.link.counts import LinkCounts
from megatron_opd.wire.link.events import Event
from megatron_opd.wire.link.wire import URGENT

Send = Callable[[str, ToSite, Sequence[bytes]], Awaitable[None]]
"""Sends a record, and frames behind it, to a site; waits while its link is full."""


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


class Versions(Protocol):
    """Names the methods of sites.versions.SiteVersions that are about single sites.

    It sends Offer, Piece and Missing through a `Send`, which is the hub's: so the hub knows which
    versions a site was offered.
    """

    async def joined(self, site: str) -> None:
        """Offer all there is to a site that is new, or another process, and was welcomed.

        Returns once the offers are sent, before which the site is given no prompt.
        """
        ...

    async def left(self, site: str) -> None:
        """Keep nothing for a site any longer."""
        ...

    def wants(self, site: str, want: Want) -> None:
        """Answer a Want in time. ValueError: no site would ask so."""
        ...
