"""Notices a process or engine that is gone, and says which, how it ended and where its log is.

The controller talks to engines over sockets; a broken connection says little. The guard knows the
processes behind them, so its cause is the one the user reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_bridge.errors import ServerUnreachable, exit_text


class ProcessDied(RuntimeError):
    """Reports in one line that a watched process ended while it was needed."""


class EngineLost(RuntimeError):
    """Reports in one line that a watched engine stopped answering."""


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """Describes a process of this machine.

    poll: returns None while it runs, otherwise its exit code (as subprocess.Popen.poll does). log:
    shown to the user. cause: what ended it, in words, if that is known. url: where a server is
    reached; None: it is none. follows: exit codes which say that another part ended before.
    """

    name: str
    poll: Callable[[], int | None]
    log: Path | None = None
    cause: Callable[[], str | None] = lambda: None
    url: str | None = None
    follows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WatchedEngine:
    """Describes an engine started elsewhere.

    alive: asks it. False means no answer in time, which a busy engine gives too; OSError and
    ServerUnreachable say that nothing listens there.
    """

    name: str
    alive: Callable[[], Awaitable[bool]]


class HealthGuard:
    """Polls processes and engines; implements controller.ports.Guard.

    Args:
        processes: those on this machine.
        engines: those started elsewhere.
        interval_s: seconds between two polls of the processes.
        engine_interval_s: seconds between two questions to an engine.
        engine_misses: an engine is lost after this many unanswered questions in a row,
        engine_refusals: or after this many refused connections in a row.
        on_tick: called at every poll of the processes (memory sampling).
    """

    def __init__(
        self,
        processes: Sequence[WatchedProcess] = (),
        engines: Sequence[WatchedEngine] = (),
        *,
        interval_s: float = 0.5,
        engine_interval_s: float = 2.0,
        engine_misses: int = 6,
        engine_refusals: int = 2,
        on_tick: Callable[[], object] | None = None,
    ) -> None:
        self.processes, self._engines = tuple(processes), tuple(engines)
        self._interval_s, self._engine_interval_s = interval_s, engine_interval_s
        self._engine_misses, self._engine_refusals = engine_misses, engine_refusals
        self._on_tick = on_tick

    async def watch(self) -> None:
        """Run until cancelled. Raises ProcessDied or EngineLost."""
        watchers = [self._watch_processes(), *map(self._watch_engine, self._engines)]
        tasks = [asyncio.create_task(watcher) for watcher in watchers]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            raise next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()

    async def diagnose(
        self, error: Exception | None = None, grace_s: float = 1.0
    ) -> ProcessDied | None:
        """Return the process whose end explains a failure just seen; None after `grace_s`.

        A connection breaks a moment before the process behind it can be reaped. error: the failure,
        which says nothing here.
        """
        if not self.processes:
            return None
        deadline_s = asyncio.get_running_loop().time() + grace_s
        while True:
            dead = self._first_dead()
            if dead is not None or asyncio.get_running_loop().time() >= deadline_s:
                return dead
            await asyncio.sleep(min(self._interval_s, 0.05))

    async def _watch_processes(self) -> Exception:
        while (dead := self._first_dead()) is None:
            if self._on_tick is not None:
                self._on_tick()
            await asyncio.sleep(self._interval_s)
        return dead

    async def _watch_engine(self, engine: WatchedEngine) -> Exception:
        misses = refusals = 0
        while misses < self._engine_misses and refusals < self._engine_refusals:
            await asyncio.sleep(self._engine_interval_s)
            try:
                misses = 0 if await engine.alive() else misses + 1
                refusals = 0
            except TimeoutError:
                misses += 1
            except (OSError, ServerUnreachable):
                refusals += 1
        if refusals == self._engine_refusals:
            return EngineLost(f"{engine.name} is gone: nothing listens there any more")
        return EngineLost(f"{engine.name} did not answer {misses} times in a row")

    def _first_dead(self) -> ProcessDied | None:
        ended = [(each, code) for each in self.processes if (code := each.poll()) is not None]
        return _died(*min(ended, key=_order)) if ended else None


def _order(ended: tuple[WatchedProcess, int]) -> tuple[bool, bool, bool]:
    """Return the place of an end among those seen at once; the likeliest cause is the first.

    What was killed comes before what ended by itself, as a rank does whose peer is gone, and a
    server before the learner, whose end leaves servers alone.
    """
    process, code = ended
    return code in process.follows, code >= 0, process.url is None


def _died(process: WatchedProcess, code: int) -> ProcessDied:
    log = f", see {process.log}" if process.log is not None else ""
    cause = process.cause()
    if cause is not None:
        return ProcessDied(f"{process.name} ended: {cause}{log}")
    return ProcessDied(f"{process.name} ended with {exit_text(code)}{log}")
