"""Ends a run that is told to by a signal.

SIGINT (Ctrl-C) ends it at once. SIGTERM and SIGUSR1 come from schedulers that take the machine
away: a run that trains first makes a checkpoint, for at most `grace_s`, and the program's exit code
says that it is to be started again. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from megatron_opd.errors import Preempted
from sglang_bridge.errors import one_line

PREEMPTIONS = (signal.SIGTERM, signal.SIGUSR1)
Handlers = Mapping[signal.Signals, Callable[[], object]]


@contextmanager
def handled(handlers: Handlers) -> Iterator[None]:
    """Call a function for each of these signals.

    After the block they do nothing, so that what is ending can end.
    """
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.add_signal_handler(number, lambda: None)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Stop the current task on SIGINT and SIGTERM; KeyboardInterrupt comes out of the block."""
    task = asyncio.current_task()
    assert task is not None
    try:
        with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), task.cancel)):
            yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def preempt_now(number: int, frame: object) -> None:
    """Raise Preempted, as a handler of signal.signal for a run that has not begun."""
    raise Preempted(f"{signal.Signals(number).name}: nothing was begun yet")


class Stopping:
    """Knows whether one run was told to end, and how it may.

    Args:
        grace_s: seconds from the first signal to the end of a checkpoint.
        say: tells the user.
    """

    def __init__(self, grace_s: float, say: Callable[[str], None]) -> None:
        self._grace_s, self._say = grace_s, say
        self._ask: Callable[[], None] | None = None
        self._signal: str | None = None
        self._interrupted = False
        self._limit: asyncio.TimerHandle | None = None

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """End the current task by signals: out comes KeyboardInterrupt or Preempted."""
        task = asyncio.current_task()
        assert task is not None
        interrupt = partial(self._interrupt, task)
        handlers: dict[signal.Signals, Callable[[], object]] = {signal.SIGINT: interrupt}
        for number in PREEMPTIONS:
            handlers[number] = partial(self._preempt, number.name, task)
        try:
            with handled(handlers):
                yield
        except asyncio.CancelledError as cancelled:
            raise self.meant(cancelled) from None

    def meant(self, error: BaseException) -> BaseException:
        """Return the end that a signal asked for in place of a cancellation; else the error.

        A cancellation that no signal asked for is an error of its own.
        """
        if not isinstance(error, asyncio.CancelledError):
            return error
        if self._signal is not None:
            return Preempted(f"{self._signal}, without a further checkpoint")
        if self._interrupted:
            return KeyboardInterrupt()
        return RuntimeError(f"a part was cancelled, and no signal asked for it {error}".rstrip())

    @contextmanager
    def after(self, ask: Callable[[], None]) -> Iterator[None]:
        """Let what is inside end by itself once it is preempted; then Preempted comes out of it.

        ask: makes it end early. What fails from then on only costs the checkpoint: the scheduler
        may have ended the learner too.
        """
        self._ask = ask
        try:
            yield
        except Exception as error:
            if self._signal is None:
                raise
            said = f"{self._signal}, without a further checkpoint: {one_line(str(error))}"
            raise Preempted(said) from error
        finally:
            self._ask = None
            if self._limit is not None:
                self._limit.cancel()
        if self._signal is not None:
            raise Preempted(self._signal)

    def _interrupt(self, task: asyncio.Task[None]) -> None:
        self._interrupted = True
        task.cancel()

    def _preempt(self, name: str, task: asyncio.Task[None]) -> None:
        if self._signal is not None or self._ask is None:
            self._signal = self._signal or name
            task.cancel()
            return
        self._signal = name
        self._say(f"{name}: the run ends after a checkpoint, within {self._grace_s:g} s")
        self._ask()
        self._limit = asyncio.get_running_loop().call_later(self._grace_s, task.cancel)
