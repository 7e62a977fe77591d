"""Sends what a site has finished, while the learner at the other end is known to want it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec

from megatron_opd.sites.messages import Gone, SiteDone, encode
from megatron_opd.sites.ports import SiteLink
from megatron_opd.sites.site_weights import SiteWeights
from megatron_opd.transport.samples import Frames


@dataclass(frozen=True, slots=True)
class Finished:
    """Holds what became of a prompt.

    answer: Done as it was when sampling ended, or Gone. frames: of the sample. ended_s: when, on
    the event loop's clock. newest: version of its weights, None without a sample.
    """

    answer: SiteDone | Gone
    frames: Frames
    ended_s: float
    newest: int | None


class SiteOutbox:
    """Sends finished prompts, each after the version that it was sampled with was announced.

    is_open: whether the learner has welcomed the site and is known to have the versions that were
    sampled with; what is finished before is in the next Hello, or delivered again then.
    """

    def __init__(self, link: SiteLink, weights: SiteWeights) -> None:
        self._link, self._weights = link, weights
        self.is_open = False

    async def deliver(self, finished: Finished) -> None:
        """Send what is finished, unless the outbox is closed."""
        await self._weights.announced()
        if not self.is_open:
            return
        answer = finished.answer
        if isinstance(answer, SiteDone):
            age_s = asyncio.get_running_loop().time() - finished.ended_s
            answer = msgspec.structs.replace(answer, age_s=max(0.0, age_s), sent_s=time.time())
        await self._link.send([encode(answer), *finished.frames])
