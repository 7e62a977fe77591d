"""Answers which start this server is of, by a proof once it is up, and which runs, by their claims.

Both are answered by the process that serves HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_bridge import wire
from sglang_bridge.claims import CONFLICT, LEASE_S, Claim, ClaimStep, Step
from sglang_bridge.errors import one_line
from sglang_bridge.proof import MOST_CHALLENGE, proof
from sglang_bridge.server.compat import startup

MOST_BYTES = 1 << 14
MOST_CLAIMS = 1024


@dataclass(frozen=True, slots=True)
class _Held:
    claim: Claim
    until_s: float


class Claims:
    """Grants this server to one run that writes its weights, or to any that only have it score.

    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[tuple[str, bool], _Held] = {}

    def refusal(self, claim: Claim, step: Step) -> str | None:
        """Takes a step; returns why it is refused, None if it is not."""
        now_s = self._clock()
        self._held = {key: held for key, held in self._held.items() if held.until_s > now_s}
        key = claim.run, claim.writes
        own = self._held.get(key)
        other_process = own is not None and own.claim.process != claim.process
        if step == "end":
            if own is not None and not other_process:
                del self._held[key]
            return None
        if step == "renew" and own is not None and other_process:
            return f"{own.claim.name} goes on with this run, this process is not to"
        for held in self._held.values():
            if held.claim.run != claim.run and (held.claim.writes or claim.writes):
                return _in_use_text(held.claim, now_s - held.until_s + LEASE_S)
        if own is None and len(self._held) == MOST_CLAIMS:
            return f"{MOST_CLAIMS} runs use this server already"
        self._held[key] = _Held(claim, now_s + LEASE_S)
        return None


def _in_use_text(held: Claim, silent_s: float) -> str:
    does = (
        "writes its weights into this server, which no other run may use meanwhile"
        if held.writes
        else "has this server score, so no other run may write weights into it"
    )
    return (
        f"{held.name} {does}; name another server, or end that run (it was last heard "
        f"{silent_s:.0f} s ago; the claim of one that was killed ends after {LEASE_S:g} s)"
    )


def read_step(body: bytes) -> ClaimStep:
    """Returns what a run asks. ValueError: nothing of that kind, in one line."""
    try:
        return msgspec.json.decode(body, type=ClaimStep)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"no claim: {one_line(str(error))}") from None


def add_owner_routes(nonce: str | None) -> None:
    """Lets this server prove which start it is of, and be claimed. nonce: None: of none of ours."""
    claims = Claims()

    async def prove(request: Any) -> Any:
        if startup.is_starting():
            return startup.reply("", wire.STARTING)
        challenge = request.query_params.get(wire.CHALLENGE, "")
        known = nonce is not None and 0 < len(challenge) <= MOST_CHALLENGE
        return startup.reply(proof(nonce, challenge) if known and nonce else "", 200)

    async def claim(request: Any) -> Any:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                return startup.reply(f"a body of more than {MOST_BYTES} bytes", 413)
        try:
            asked = read_step(bytes(body))
        except ValueError as error:
            return startup.reply(str(error), 400)
        refused = claims.refusal(asked.claim, asked.step)
        return startup.reply(refused or "", 200 if refused is None else CONFLICT)

    startup.add_own_route(wire.PROOF_ROUTE, prove, "GET")
    startup.add_own_route(wire.CLAIM_ROUTE, claim, "POST")
