"""Knows why a command ended: the first cause, whatever else ended because of it or after it.

Invariant: the cause is noted while everything that was started still runs, before anything is
closed or stopped. So no end that the command makes itself, no error of its closing, and no signal
that comes meanwhile can be taken for it.

An error often tells only that a connection is gone. Then the process behind that connection, if it
has ended too, is the cause; an answer that a living part gave, or its own words, never is explained
by the end of a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import zmq

from megatron_opd.controller.errors import LoopFailed
from megatron_opd.data.faults import BadRows
from megatron_opd.errors import CheckpointFailed, LearnerError, PartGone, RunFailed, UserError
from megatron_opd.launch.health import EngineLost, HealthGuard, ProcessDied, WatchedProcess
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.stopping import stopped_by_signals
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
Close = Callable[[], Awaitable[object] | None]
"""Closes a part, at once or in time."""

SERVER_ERROR = 500
FORESEEN = (
    *(BridgeError, LearnerError, LoopFailed, PartGone),
    *(ProcessDied, EngineLost, CheckpointFailed, RunFailed),
)
"""Errors that a user can read as they are."""


class FirstCause:
    """Keeps the first cause of a command's end.

    watched: returns every process whose end nobody has asked for, as it is now.
    """

    def __init__(self, watched: Callable[[], Sequence[WatchedProcess]]) -> None:
        self._watched = watched
        self._noted: list[BaseException] = []
        self._explained: list[ProcessDied] = []

    @property
    def first(self) -> BaseException | None:
        """Returns the error, or the cancellation, that was first; None: there was none."""
        return self._noted[0] if self._noted else None

    async def of(self, work: Awaitable[ResultT]) -> ResultT:
        """Return what `work` does; an error that leaves it is the cause, unless there was one."""
        try:
            return await work
        except BaseException as error:
            await self._note(error, self._watched())
            raise

    def closing(self, close: Close) -> Callable[[], Awaitable[None]]:
        """Return `close` as it is called while the command ends: its error hides no earlier one.

        The learner ends then because it is to, and explains nothing.
        """

        async def closed() -> None:
            try:
                await _called(close)
            except BaseException as error:
                await self._note(error, [each for each in self._watched() if each.url is not None])
                raise

        return closed

    async def _note(self, error: BaseException, watched: Sequence[WatchedProcess]) -> None:
        if self._noted:
            return
        self._noted.append(error)
        if isinstance(error, Exception):
            died = await explained(error, watched)
            self._explained += [] if died is None else [died]

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
        foreseen = isinstance(error, FORESEEN) or bool(self._explained)
        text = str(self._explained[0] if self._explained else error)
        if isinstance(error, UserError):
            return text, UserError(text)  # it may end with lines of a log
        if foreseen:
            text = one_line(text)
            return text, RunFailed(f"{text}{logs}")
        text = one_line(f"{type(error).__name__}: {text}{where}")
        return text, RunFailed(f"{text}; {keep_traceback(error)}")


@asynccontextmanager
async def closing_all(
    ends: FirstCause,
    processes: Processes,
    logs: str,
    keep_traceback: Callable[[BaseException], str],
) -> AsyncIterator[AsyncExitStack]:
    """Run `opd eval`, `opd mismatch` or a site inside the block, and end all parts after it.

    A run closes in an order of its own (run/run.py). SIGINT and SIGTERM stop the block. Yields what
    takes the closing of each part; processes end last. Whatever leaves the block comes out as a
    user reads it: UserError, RunFailed, KeyboardInterrupt. logs, keep_traceback: see
    FirstCause.failure.
    """
    try:
        try:
            with stopped_by_signals():
                async with AsyncExitStack() as closers:
                    yield closers
        finally:
            await ends.closing(processes.stop)()
    except BaseException as last:
        raise ends.end(last, logs, keep_traceback) from last


async def _called(close: Close) -> None:
    if (ending := close()) is not None:
        await ending


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
