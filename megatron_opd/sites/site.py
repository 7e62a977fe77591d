"""Runs a sampler site: does what its learner sends over the link.

While the link is broken the site goes on with what it has. A learner that starts again is told what
the site holds, and gets what it still wants of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from megatron_opd.sites.learner_watchdog import LearnerTimeouts, LearnerWatchdog
from megatron_opd.sites.messages import (
    Again,
    Farewell,
    FilePiece,
    Forget,
    Leaving,
    MissingPiece,
    Offer,
    SiteHello,
    SiteTask,
    SiteWelcome,
    ToSite,
    decode_to_site,
    encode,
)
from megatron_opd.sites.mirror import BadOffer
from megatron_opd.sites.outbox import SiteOutbox
from megatron_opd.sites.ports import SiteLink
from megatron_opd.sites.sampling import SiteSampling
from megatron_opd.sites.site_weights import SiteWeights
from megatron_opd.transport.samples import Frames
from megatron_opd.weight_sync.loops import run_until_first_ends
from megatron_opd.wire.codec import BadMessage
from megatron_opd.wire.link.events import Broken, Mended, Received, Restarted
from sglang_bridge.errors import one_line

logger = logging.getLogger(__name__)

LEAVE_S = 2.0
"""Longest wait in seconds until a learner knows that the site leaves."""


class Site:
    """Serves one learner.

    Args:
        link: to the learner.
        hello: says what the site is; its clock_s and holds are filled in.
        sampling: works on prompts.
        weights: pulls and takes versions of them.
        outbox: sends what is finished.
        timeouts: how long the site waits for the learner's site.
        say: tells the user.

    refused: messages that make no sense, by why.
    """

    def __init__(
        self,
        link: SiteLink,
        hello: SiteHello,
        sampling: SiteSampling,
        weights: SiteWeights,
        outbox: SiteOutbox,
        timeouts: LearnerTimeouts,
        say: Callable[[str], None],
    ) -> None:
        self._link, self._hello, self._say = link, hello, say
        self._sampling, self._weights, self._outbox = sampling, weights, outbox
        self._watchdog = LearnerWatchdog(timeouts, say)
        self._run: str | None = None
        self._is_welcome = False
        self._farewell: Farewell | None = None
        self.refused: Counter[str] = Counter()

    async def serve(self) -> str | None:
        """Serve until the learner says farewell; return why, None: the run has ended well.

        Raises what the site cannot go on without; LearnerGone.
        """
        weights, sampling = self._weights, self._sampling
        try:
            failures = sampling.failed(), weights.failed(), self._watchdog.watch()
            await run_until_first_ends(self._listen(), *failures, weights.serve_on())
        finally:
            await sampling.close()
            await weights.end()
        assert self._farewell is not None
        if self._farewell.cause is None:
            weights.remove()
        return self._farewell.cause

    async def leave(self) -> None:
        """Tell the learner that the site ends, if it can be told at once."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._link.send([encode(Leaving())])
        except TimeoutError:
            logger.warning("the learner could not be told that the site leaves")

    def counts(self) -> dict[str, Any]:
        """Return what the site did, for its user and for tests."""
        sampling, weights = self._sampling, self._weights
        pulls, counts = weights.pulls, self._link.counts()
        return {
            "samples_sent": sampling.delivered,
            "samples_begun_anew": sampling.begun_anew,
            "version": weights.version,
            "versions_taken": weights.num_taken,
            "weight_bytes": 0 if pulls is None else pulls.num_bytes,
            "weights_refused": {} if pulls is None else dict(pulls.refused),
            "records_refused": dict(self.refused),
            "connections": counts.connections,
            "bytes_sent": counts.bytes_sent,
            "bytes_received": counts.bytes_received,
        }

    async def _listen(self) -> None:
        """Do what the learner says, until it says farewell."""
        while self._farewell is None:
            event = await self._link.next()
            if isinstance(event, Broken):
                self._watchdog.link_down()
            else:
                self._watchdog.link_up()
            match event:
                case Received():
                    await self._received(event)
                case Restarted():
                    await self._introduce()
                case Broken():
                    self._say(
                        "the link to the learner is broken; the site goes on with what it has"
                    )
                case Mended():
                    self._say("the link to the learner is mended")

    async def _introduce(self) -> None:
        """Tell a learner that has started, or started over, what the site is and holds."""
        self._is_welcome = self._outbox.is_open = False
        await self._weights.pause()
        hello = msgspec.structs.replace(
            self._hello, clock_s=time.time(), holds=self._sampling.holds
        )
        await self._link.send([encode(hello)])

    async def _received(self, received: Received) -> None:
        try:
            message = decode_to_site(bytes(received.parts[0]))
            await self._do(message, received.parts[1:])
        except (BadMessage, BadOffer, ValueError) as error:
            self.refused[type(error).__name__] += 1
            logger.warning("from the learner: %s", one_line(str(error)))

    async def _do(self, message: ToSite, frames: Frames) -> None:
        """Do what a record says. ValueError: it makes no sense."""
        if isinstance(message, Farewell):
            self._farewell = message
        elif isinstance(message, SiteWelcome):
            await self._welcomed(message)
        elif isinstance(message, Again):
            await self._introduce()
        elif not self._is_welcome:
            raise ValueError(f"{type(message).__name__} before Welcome")
        elif isinstance(message, Forget):
            self._sampling.forget(message.uids)
        elif isinstance(message, SiteTask):
            self._weights.tasks_begin()
            self._open_outbox(0)
            self._sampling.begin(message)
        else:
            self._about_weights(message, frames)

    async def _welcomed(self, welcome: SiteWelcome) -> None:
        self._is_welcome = True
        self._sampling.keep_only(welcome.wanted)
        self._outbox.is_open = False
        if welcome.run != self._run:
            first, self._run = self._run is None, welcome.run
            self._say("the learner is there" if first else "the learner has started again")
        await self._weights.begin(welcome.run)

    def _about_weights(self, message: Offer | FilePiece | MissingPiece, frames: Frames) -> None:
        pulls = self._weights.pulls
        assert pulls is not None, "made at the Welcome"
        if isinstance(message, Offer):
            pulls.offered(message)
            self._open_outbox(message.version)
        elif isinstance(message, MissingPiece):
            pulls.missing(message.name)
        elif len(frames) == 1:
            pulls.arrived(message, frames[0])
        else:
            raise ValueError(f"a Piece with {len(frames)} frames")

    def _open_outbox(self, version: int) -> None:
        """Deliver what is finished, once it is known which version the learner goes on from."""
        if not self._outbox.is_open:
            self._outbox.is_open = True
            anew = self._weights.version > version
            self._sampling.deliver_again(version, anew=anew)
