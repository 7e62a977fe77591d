"""Holds what the learner's site knows of one sampler site, and what is to be sent to it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection

from megatron_opd.buffer.delays import DelayStream
from megatron_opd.sites.figures import SiteFigures
from megatron_opd.sites.tasks import FirstFailure

SiteAction = Callable[[], Awaitable[None]]


class SiteMember:
    """Holds the state of one site.

    Args:
        name: of the site.
        delays: hold its samples back, for studies.
        failure: takes the error of an action.

    process: counts the processes that were there, and the runs that they were part of. slots:
    prompts that it holds at most. offered, served: versions that its process was offered, and
    samples or sampled with. awaits_hello: it is to say Hello again, and what it says before is of
    a run that is no more. has_left: its user ended it. farewell_sent: that the run has ended.
    quarantined: why it is; None: it is not. last_refusal: the last one that the user has read.
    """

    def __init__(self, name: str, delays: DelayStream, failure: FirstFailure) -> None:
        self.name = name
        self._delays, self._failure = delays, failure
        self.figures = SiteFigures()
        self.process = 0
        self.slots = 0
        self.is_welcome = self.is_broken = self.awaits_hello = False
        self.has_left = self.farewell_sent = False
        self.offered: set[int] = set()
        self.served: set[int] = set()
        self.quarantined: str | None = None
        self.last_refusal: str | None = None
        self._process_name: str | None = None
        self._returning: frozenset[int] = frozenset()
        self._newest_before = -1
        self._answered: OrderedDict[int, None] = OrderedDict()
        self._num_samples = 0
        self._actions: asyncio.Queue[SiteAction] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        """Returns in a word how the site does."""
        if self.quarantined is not None:
            return "quarantined"
        if not self.is_welcome:
            return "refused" if self.last_refusal is not None else "away"
        return "broken" if self.is_broken else "connected"

    def begin(self, process: str, slots: int, returning: Collection[int], newest: int) -> None:
        """Note that a process is part of the run.

        process: its name. returning: prompts that it holds from before, sampled with versions up to
        `newest`.
        """
        self.figures.starts += process != self._process_name
        self._process_name = process
        self.slots, self.is_welcome, self.last_refusal = slots, True, None
        self._returning, self._newest_before = frozenset(returning), newest

    def end(self) -> None:
        """Forget the process that was there; actions that are queued for it are not done."""
        self.close()
        self.stop_timer()
        self.process += 1
        self.is_welcome = self.is_broken = self.awaits_hello = False
        self.has_left = self.farewell_sent = False
        self.offered, self.served = set(), set()
        self._answered.clear()
        self._actions = asyncio.Queue()

    def start_over(self) -> None:
        """Forget all but the link to the process that is there, which is to say Hello anew."""
        broken = self.is_broken
        self.end()
        self.is_broken, self.awaits_hello = broken, True

    def serves(self, version: int) -> None:
        """Note that the site samples with a version from now on."""
        self.served.add(version)
        self.figures.version = version

    def may_have_sampled(self, uid: int, version: int) -> bool:
        """Return whether the site can have sampled a prompt with a version."""
        before = uid in self._returning and 0 <= version <= self._newest_before
        return before or version in self.served

    # ------------------------------------------------------------ prompts

    def answered(self, uid: int) -> None:
        """Note that the site has finished a prompt, which it may keep."""
        self._answered[uid] = None
        while len(self._answered) > self.slots:
            self._answered.popitem(last=False)

    def forgot(self, uid: int) -> None:
        """Note that the site was told to forget a prompt."""
        self._answered.pop(uid, None)

    def keeps(self, uid: int) -> bool:
        """Return whether the site may keep what it finished of a prompt."""
        return uid in self._answered

    def next_delay_s(self) -> float:
        """Return for how many seconds the next sample is held back."""
        self._num_samples += 1
        return self._delays.seconds(self._num_samples - 1)

    # ------------------------------------------------------------ actions

    def enqueue(self, action: SiteAction) -> None:
        """Do something for the site, after all that was enqueued before."""
        self._actions.put_nowait(action)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(self._actions))
            self._worker.add_done_callback(self._failure.watch)

    def start_timer(self, seconds: float, call: Callable[[], None]) -> None:
        """Call back after a time, unless the timer is stopped or started again."""
        self.stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def stop_timer(self) -> None:
        """Stop the timer, if it runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """End all actions."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.cancel()

    async def _work(self, actions: asyncio.Queue[SiteAction]) -> None:
        while True:
            action = await actions.get()
            await action()
