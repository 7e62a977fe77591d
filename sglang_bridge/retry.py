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
from typing import Self, TypeVar

from sglang_bridge.errors import BridgeError, RequestAborted, ServerRefused, ServerUnreachable

Result = TypeVar("Result")

TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500
VERDICT_S = 6.0
"""So long after a connection broke it is known whether its server is lost (a process that ended is
seen at once, a port where nothing listens after two questions)."""
BUSY_S = 600.0
"""So long, over all tries of a request, a server that says when to come back is waited for."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Says how often to try. first_wait_s: before the second; doubled each time to max_wait_s.

    attempts: tries in all.
    """

    attempts: int
    first_wait_s: float = 0.2
    max_wait_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """Keeps what counts of a failed try. The error itself would keep the request alive.

    gone, stalled: of ServerUnreachable; no other error can be that of a server that is taken out.
    """

    gone: asyncio.Event | None
    stalled: bool

    @classmethod
    def of(cls, error: BridgeError) -> Self:
        """Describe an error."""
        lost = isinstance(error, ServerUnreachable)
        return cls(error.gone, error.stalled) if lost else cls(None, stalled=False)

    @property
    def taken_out(self) -> bool:
        """Returns whether its server was taken out, for another cause than this request."""
        # a request that stalled while its server answered may be the cause of that server's end
        return self.gone is not None and self.gone.is_set() and not self.stalled


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


def is_unserved(error: BridgeError) -> bool:
    """Returns whether a request that nothing is wrong with may be served later, or elsewhere.

    Not what a server gave up: it did so for the request's own sake, or because it was told to.
    """
    return is_transient(error) and not isinstance(error, RequestAborted)


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
    at once any error that `repeat` does not allow. A try whose server was taken out then or soon
    after does not count: servers are taken out so often as they are lost, which others bound. One
    that a server answered with a time to come back at does not count either, as long as the waits
    for such times stay within BUSY_S.
    """
    if backoff.attempts < 1:
        raise ValueError(f"attempts must be >= 1, got {backoff.attempts}")
    wait_s, busy_s = backoff.first_wait_s, 0.0
    failed: list[_Failure] = []
    for earlier in itertools.count():
        try:
            return await call(earlier)
        except BridgeError as error:
            again_s = error.retry_after_s if isinstance(error, ServerRefused) else None
            if again_s is None:
                failed.append(_Failure.of(error))
            else:
                again_s = max(again_s, wait_s)
                busy_s += again_s
            if busy_s > BUSY_S:
                raise
            if not repeat(error) or await _counted(failed, backoff.attempts) >= backoff.attempts:
                raise
        if again_s is not None:
            await asyncio.sleep(again_s)
            continue
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, backoff.max_wait_s)
    raise AssertionError("unreachable")


async def _counted(failed: list[_Failure], limit: int) -> int:
    """Returns how many of these tries count; where they reach `limit`, waits for the verdict."""
    open_ones = [failure for failure in failed if not failure.taken_out]
    gone = [f.gone for f in open_ones if f.gone is not None and not f.stalled]
    if len(open_ones) >= limit and gone:
        verdicts = [asyncio.ensure_future(event.wait()) for event in gone]
        await asyncio.wait(verdicts, timeout=VERDICT_S, return_when=asyncio.FIRST_COMPLETED)
        for verdict in verdicts:
            verdict.cancel()
        open_ones = [failure for failure in failed if not failure.taken_out]
    return len(open_ones)
