"""Repeats requests, in this place alone, and counts the tries.

Neither HttpConnection nor Fleet repeats anything: the caller that sends a request for work counts
its tries here. A fleet lets a server that failed rest, so that a repeat goes to another one if
there is one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from sglang_bridge.errors import BridgeError, RequestAborted, ServerRefused, ServerUnreachable

Result = TypeVar("Result")

TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500


@dataclass(frozen=True, slots=True)
class Backoff:
    """Says how often to try. first_wait_s: before the second; doubled each time to max_wait_s.

    attempts: tries in all.
    """

    attempts: int
    first_wait_s: float = 0.2
    max_wait_s: float = 5.0


def is_transient(error: BridgeError) -> bool:
    """Returns whether the same request may succeed later: no answer, overload, a server's fault."""
    if isinstance(error, ServerRefused):
        return error.status == TOO_MANY_REQUESTS or error.status >= SERVER_ERROR
    return isinstance(error, ServerUnreachable | RequestAborted)


def is_lost_connection(error: BridgeError) -> bool:
    """Returns whether the connection failed or broke.

    Not when the server was silent for the whole wait: to repeat what took too long would choose by
    length alone.
    """
    return isinstance(error, ServerUnreachable) and not (error.sent and error.timed_out)


def is_unsent(error: BridgeError) -> bool:
    """Returns whether the request certainly did not reach the server."""
    return isinstance(error, ServerUnreachable) and not error.sent


async def retried(
    call: Callable[[int], Awaitable[Result]],
    backoff: Backoff,
    repeat: Callable[[BridgeError], bool] = is_transient,
) -> Result:
    """Returns the result of the first try that succeeds.

    `call` is given the number of tries before it. Raises the last error when all tries failed, and
    at once any error that `repeat` does not allow. A try that ended because its server was taken
    out does not count: servers are taken out so often as they are lost, which others bound.
    """
    if backoff.attempts < 1:
        raise ValueError(f"attempts must be >= 1, got {backoff.attempts}")
    wait_s = backoff.first_wait_s
    left = backoff.attempts
    for earlier in itertools.count():
        try:
            return await call(earlier)
        except BridgeError as error:
            left -= not (isinstance(error, ServerUnreachable) and error.taken_out)
            if left == 0 or not repeat(error):
                raise
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, backoff.max_wait_s)
    raise AssertionError("unreachable")
