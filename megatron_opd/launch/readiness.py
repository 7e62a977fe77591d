"""Waits until the parts of a run are ready, and watches those that are until all are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_bridge import wire
from sglang_bridge.claims import Claim
from sglang_bridge.errors import ServerRefused, ServerUnreachable
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import ServerInfo

SAY_EVERY_S = 30.0
RETRY_S = 1.0


async def servers_ready(
    fleet: Fleet, timeout_s: float, *, used: bool = False, claim: Claim | None = None
) -> tuple[ServerInfo, ...]:
    """Return what a fleet's servers are, once all of them answer. used, claim: see Fleet.start.

    BridgeError: one answers something else, or there is no answer within `timeout_s`.
    """
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while True:
        try:
            return await fleet.start(used=used, claim=claim)
        except (ServerUnreachable, ServerRefused) as error:
            not_yet = isinstance(error, ServerUnreachable) or error.status == wire.STARTING
            if not not_yet or clock() >= deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, slots=True)
class StartingPart:
    """Describes a part that a run waits for.

    ready: returns once the part is there, and raises if it cannot be. watch: called after that;
    raises once the part is gone again, and never returns. progress: says what its name is followed
    by while it is awaited.
    """

    ready: Awaitable[Any]
    watch: Callable[[], Awaitable[Any]]
    progress: Callable[[], str] = str


async def ready_now() -> None:
    """Return at once, for a part that is there already."""


async def all_ready(
    parts: Mapping[str, StartingPart], say: Callable[[str], None], every_s: float = SAY_EVERY_S
) -> None:
    """Wait for all parts, by name, and say what is still missing every `every_s`.

    The first part that fails, or is gone again while others are awaited, ends the wait with its
    error.
    """
    missing: dict[asyncio.Future[Any], str] = {
        asyncio.ensure_future(part.ready): name for name, part in parts.items()
    }
    watches: list[asyncio.Future[Any]] = []
    try:
        while missing:
            done, _ = await asyncio.wait(
                {*missing, *watches}, timeout=every_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in (*missing, *watches):  # of several at once the first one named
                if task not in done:
                    continue
                task.result()
                watches.append(asyncio.ensure_future(parts[missing.pop(task)].watch()))
            if not done:
                names = sorted(missing.values())
                say(f"waiting for {', '.join(name + parts[name].progress() for name in names)}")
    finally:
        for task in (*missing, *watches):
            task.cancel()
        # awaited, or asyncio would print the exceptions they ended with
        await asyncio.gather(*missing, *watches, return_exceptions=True)
