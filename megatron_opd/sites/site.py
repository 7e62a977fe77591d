"""Runs a sampler site: what a learner sends over the link is done, what is finished is sent.

While the link is broken the site goes on with what it has. A learner that starts again is told what
is here, and gets what it still wants of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from megatron_opd.sites.absence import Absence, Patience
from megatron_opd.sites.messages import (
    Again,
    Farewell,
    FilePiece,
    Forget,
    Leaving,
    MissingPiece,
    Offer,
    SiteDone,
    SiteHello,
    SiteTask,
    SiteWelcome,
    ToLearner,
    ToSite,
    decode_to_site,
    encode,
)
from megatron_opd.sites.mirror import BadOffer
from megatron_opd.sites.sampling import Finished, SiteSampling
from megatron_opd.sites.site_weights import SiteWeights
from megatron_opd.sites.together import together
from megatron_opd.transport.samples import Frames
from megatron_opd.wire.codec import BadMessage
from megatron_opd.wire.link.events import Broken, Event, Mended, Received, Restarted
from megatron_opd.wire.link.wire import URGENT
from sglang_bridge.errors import one_line

logger = logging.getLogger(__name__)

LEAVE_S = 2.0
"""Longest wait in seconds until a learner knows that the site leaves."""


class SiteLink(Protocol):
    """Names the methods of link.ends.LinkClient that a site needs."""

    async def next(self) -> Event:
        """Return what happens next."""
        ...

    async def send(self, parts: Frames, lane: int = URGENT) -> None:
        """Send a message; waits while too much waits to be sent."""
        ...


class Site:
    """Serves one learner.

    Args:
        link: to the learner.
        hello: says what the site is; its clock_s and holds are filled in.
        sampling: works on prompts.
        weights: holds the way of the weights.
        say: tells the user.
        patience: how long it waits for the learner's site.

    refused: messages that make no sense, by why.
    """

    def __init__(
        self,
        link: SiteLink,
        hello: SiteHello,
        sampling: SiteSampling,
        weights: SiteWeights,
        say: Callable[[str], None],
        patience: Patience,
    ) -> None:
        self._link, self._hello = link, hello
        self._sampling, self._weights, self._say = sampling, weights, say
        self._absence = Absence(patience, say)
        self._run: str | None = None
        self._is_unsettled = False
        self._is_welcome = False
        self._farewell: Farewell | None = None
        self.refused: Counter[str] = Counter()

    async def serve(self) -> str | None:
        """Serve until the learner says farewell; return why, None: the run has ended well.

        Raises what the site cannot go on without; LearnerGone.
        """
        weights, sampling = self._weights, self._sampling
        try:
            ends = sampling.failed(), weights.failed(), self._absence.watch()
            await together(self._listen(), *ends, weights.serve_on())
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
                await self._send(Leaving())
        except TimeoutError:
            logger.warning("the learner could not be told that the site leaves")

    async def deliver(self, finished: Finished) -> None:
        """Send what is finished to the learner, once it is known that it is wanted."""
        await self._weights.told()
        if self._is_unsettled or not self._is_welcome:
            return  # said in the next Hello, or sent once all is settled
        answer = finished.answer
        if isinstance(answer, SiteDone):
            age_s = asyncio.get_running_loop().time() - finished.ended_s
            sent_s = time.time()
            answer = msgspec.structs.replace(answer, age_s=max(0.0, age_s), sent_s=sent_s)
        await self._send(answer, finished.frames)

    async def _send(self, message: ToLearner, frames: Frames = ()) -> None:
        await self._link.send([encode(message), *frames], URGENT)

    async def _listen(self) -> None:
        """Do what the learner says, until it says farewell."""
        while self._farewell is None:
            event = await self._link.next()
            if isinstance(event, Broken):
                self._absence.begins()
            else:
                self._absence.ends()
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
        self._is_welcome = False
        await self._weights.pause()
        hello = msgspec.structs.replace(
            self._hello, clock_s=time.time(), holds=self._sampling.holds
        )
        await self._send(hello)

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
            self._settle(0)
            self._sampling.begin(message)
        else:
            self._about_weights(message, frames)

    async def _welcomed(self, welcome: SiteWelcome) -> None:
        self._is_welcome = True
        self._sampling.keep_only(welcome.wanted)
        self._is_unsettled = True
        if welcome.run != self._run:
            first, self._run = self._run is None, welcome.run
            self._say("the learner is there" if first else "the learner has started again")
        await self._weights.begin(welcome.run)

    def _about_weights(self, message: Offer | FilePiece | MissingPiece, frames: Frames) -> None:
        pulls = self._weights.pulls
        assert pulls is not None, "made at the Welcome"
        if isinstance(message, Offer):
            pulls.offered(message)
            self._settle(message.version)
        elif isinstance(message, MissingPiece):
            pulls.missing(message.name)
        elif len(frames) == 1:
            pulls.arrived(message, frames[0])
        else:
            raise ValueError(f"a Piece with {len(frames)} frames")

    def _settle(self, version: int) -> None:
        """Deliver what is finished, once it is known which version the learner goes on from."""
        if self._is_unsettled:
            self._is_unsettled = False
            anew = self._weights.version > version
            self._sampling.deliver_again(version, anew=anew)
