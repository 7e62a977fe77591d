"""Bounded retries of what is safe to repeat. The only place where a teacher's failure is caught."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from sglang_bridge.errors import RequestAborted, ServerRefused, ServerUnreachable

Result = TypeVar("Result")

TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500
TRANSIENT = (ServerUnreachable, ServerRefused, RequestAborted)


@dataclass(frozen=True, slots=True)
class Backoff:
    """attempts: tries in all. first_wait_s: before the second; doubled each time to max_wait_s."""

    attempts: int
    first_wait_s: float = 0.2
    max_wait_s: float = 5.0


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later: no answer, overload, a server's own fault."""
    if isinstance(error, ServerRefused):
        return error.status == TOO_MANY_REQUESTS or error.status >= SERVER_ERROR
    return isinstance(error, ServerUnreachable | RequestAborted)


async def retried(call: Callable[[], Awaitable[Result]], backoff: Backoff) -> Result:
    """The result of the first try that succeeds.

    Raises the last error when all tries failed, and any error that is not transient at once.
    """
    wait_s = backoff.first_wait_s
    for attempt in range(1, backoff.attempts + 1):
        try:
            return await call()
        except TRANSIENT as error:
            if attempt == backoff.attempts or not is_transient(error):
                raise
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, backoff.max_wait_s)
    raise ValueError(f"attempts must be >= 1, got {backoff.attempts}")
