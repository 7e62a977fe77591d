"""Knows why a command ended: the first cause, whatever else ended because of it or after it.

Invariant: the cause is settled while everything that was started still runs, before anything is
closed or stopped. So no end that the command makes itself, no error of its closing, and no signal
that comes meanwhile can be taken for it.

An error often tells only that a connection is gone. Then the process behind that connection, if it
has ended too, is the cause; an answer that a living part gave, or its own words, never is explained
by the end of a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import zmq

from megatron_opd.controller.errors import LoopFailed
from megatron_opd.data.faults import BadRows
from megatron_opd.errors import CheckpointFailed, PartGone, RunFailed, UserError
from megatron_opd.launch.health import EngineLost, HealthGuard, ProcessDied, WatchedProcess
from megatron_opd.transport.remote_learner import LearnerError
from sglang_bridge.errors import (
    BridgeError,
    RankFailed,
    ServerRefused,
    ServerUnreachable,
    WeightSyncFailed,
    one_line,
)

ResultT = TypeVar("ResultT")
Suspect = Callable[[WatchedProcess], bool]

SERVER_ERROR = 500
FORESEEN = (
    *(BridgeError, LearnerError, LoopFailed, PartGone),
    *(ProcessDied, EngineLost, CheckpointFailed, RunFailed),
)
"""Errors that a user can read as they are."""


class FirstCause:
    """Keeps the first cause of a command's end.

    watched: returns every process whose end nobody has asked for, as it is now.

    first: the error, or the cancellation, that was first; None: there was none yet.
    """

    def __init__(self, watched: Callable[[], Sequence[WatchedProcess]]) -> None:
        self._watched = watched
        self.first: BaseException | None = None
        self._explained: Exception | None = None

    async def of(self, work: Awaitable[ResultT]) -> ResultT:
        """Return what `work` does; an error that leaves it is the cause, unless there was one."""
        try:
            return await work
        except BaseException as error:
            await self._note(error, self._watched())
            raise

    def closing(self, close: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
        """Return `close` as it is called while the command ends: its error hides no earlier one.

        The learner ends then because it is to, and explains nothing.
        """

        async def closed() -> None:
            try:
                await close()
            except BaseException as error:
                await self._note(error, [each for each in self._watched() if each.url is not None])
                raise

        return closed

    async def _note(self, error: BaseException, watched: Sequence[WatchedProcess]) -> None:
        if self.first is not None:
            return
        self.first = error
        if isinstance(error, Exception):
            self._explained = await explained(error, watched)

    def end(
        self, last: BaseException, logs: str, keep_traceback: Callable[[BaseException], str]
    ) -> BaseException:
        """Return what a command ends with that signals alone cancel; see `failure`.

        last: what left the command, which may have hidden the first cause.
        """
        first = self.first or last
        if isinstance(first, asyncio.CancelledError):
            return KeyboardInterrupt()
        if not isinstance(first, Exception):
            return first
        return self.failure(first, logs, keep_traceback)[1]

    def failure(
        self,
        error: Exception,
        logs: str,
        keep_traceback: Callable[[BaseException], str],
        where: str = "",
    ) -> tuple[str, UserError | RunFailed]:
        """Return the cause as the user reads it, and the error that the program ends with.

        error: the first one. logs: told after what failed in a foreseen way. keep_traceback: keeps
        that of any other error, and returns where. where: told beside an unforeseen error.
        """
        error = root_of(error)
        if isinstance(error, LoopFailed) and isinstance(error.cause, UserError | BadRows):
            error = UserError(str(error.cause))
        foreseen = isinstance(error, FORESEEN) or self._explained is not None
        told = str(self._explained or error)
        if isinstance(error, UserError):
            return told, UserError(told)  # it may end with lines of a log
        if foreseen:
            told = one_line(told)
            return told, RunFailed(f"{told}{logs}")
        told = one_line(f"{type(error).__name__}: {told}{where}")
        return told, RunFailed(f"{told}; {keep_traceback(error)}")


async def explained(error: Exception, watched: Sequence[WatchedProcess]) -> ProcessDied | None:
    """Return the ended process that explains an error just seen, if one does."""
    suspects = suspects_of(error)
    if suspects is None:
        return None
    return await HealthGuard([each for each in watched if suspects(each)]).diagnose()


def root_of(error: Exception) -> Exception:
    """Return the first error of a group of tasks, which cancelled the others; else the error."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def suspects_of(error: BaseException | None) -> Suspect | None:
    """Return which processes, if they have ended, explain an error; None: none can."""
    match error:
        case ExceptionGroup():
            return suspects_of(root_of(error))
        case LoopFailed():
            return suspects_of(error.cause)
        case LearnerError():
            return None if error.final else _is_learner
        case WeightSyncFailed():
            return _anyone if error.__cause__ is None else suspects_of(error.__cause__)
        case RankFailed():
            return _anyone if error.peer_lost else None
        case ServerRefused():
            return _named_by(error.url) if error.status >= SERVER_ERROR else None
        case ServerUnreachable() | EngineLost():
            return _named_by(str(error))
        case ProcessDied() | TimeoutError() | OSError() | zmq.ZMQError():
            return _anyone
        case PartGone() | UserError() | RunFailed():
            return suspects_of(error.__cause__)
        case _:
            return None


def _anyone(_: WatchedProcess) -> bool:
    return True


def _is_learner(process: WatchedProcess) -> bool:
    return process.url is None


def _named_by(words: str) -> Suspect:
    return lambda process: process.url is not None and process.url in words
