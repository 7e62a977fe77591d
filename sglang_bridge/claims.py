"""Keeps a server one run's, which writes its weights, or that of many, which have it score.

Invariant: while a run holds a server whose weights it writes, no other run uses that server. So a
claim ends with its run, at the latest LEASE_S after it was last renewed, and a run that finds its
claim lost ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from sglang_bridge.errors import BridgeError, ServerRefused

LEASE_S = 30.0
"""Time in seconds after which a claim ends that nobody renews, as its run was killed."""
RENEW_S = 5.0
CONFLICT = 409
Step = Literal["take", "renew", "end"]


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a run's right to use a server.

    run: what identifies the run, also after it was resumed. process: what identifies the process
    that holds it. name: what the users of other runs are told. writes: it writes the server's
    weights; else it only has it score, which many runs may at once.
    """

    run: str
    process: str
    name: str
    writes: bool


class ClaimStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes what a server is asked: to grant a claim, to prolong or to end it."""

    claim: Claim
    step: Step


class ClaimRefused(BridgeError):
    """Reports that a server is another run's, or that it no longer is this run's."""


Ask = Callable[[dict[str, Any], float | None], Awaitable[object]]


class Lease:
    """Keeps the claim on one server until it is ended.

    ask: posts a ClaimStep, with a limit in seconds.
    """

    def __init__(self, url: str, ask: Ask) -> None:
        self._url, self._ask = url, ask
        self._claim: Claim | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._lost: str | None = None

    async def take(self, claim: Claim) -> None:
        """Take the server for a run, and renew that from now on. ClaimRefused: another has it."""
        await self._step(claim, "take")
        self._claim, self._lost = claim, None
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    def require(self) -> None:
        """Raises ClaimRefused if the claim was lost to another run."""
        if self._lost is not None:
            raise ClaimRefused(self._lost)

    async def end(self) -> None:
        """Ends the claim, if there is one. One that cannot be ended now ends by itself."""
        claim, self._claim = self._claim, None
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        if claim is not None and self._lost is None:
            # one that is gone or busy: nobody renews the claim any more
            with contextlib.suppress(BridgeError):
                await self._step(claim, "end", RENEW_S)

    async def _renew(self) -> None:
        while self._claim is not None:
            await asyncio.sleep(RENEW_S)
            try:
                await self._step(self._claim, "renew", LEASE_S)
            except BridgeError as error:
                # if the server is gone, who watches its health says so; else the next one counts
                if isinstance(error, ClaimRefused):
                    self._lost = str(error)
                    return

    async def _step(self, claim: Claim, step: Step, limit_s: float | None = None) -> None:
        try:
            await self._ask(msgspec.to_builtins(ClaimStep(claim, step)), limit_s)
        except ServerRefused as error:
            if error.status != CONFLICT:
                raise
            raise ClaimRefused(f"{self._url}: {error.body}") from None
