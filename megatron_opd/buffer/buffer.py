"""Gives out samples in the order of their prompts' admission; a dropped sample leaves no gap.

A prompt enters at admission, so the buffer knows the order before any result exists. Its sample
arrives later, in any order, or never (drop). The front of the line moves as soon as its first
member is scored or dropped. A sample that is scored but not yet taken may still be withdrawn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

from megatron_opd.records.types import AnySample


class SampleBuffer:
    """Holds samples in admission order. All methods are for one event loop."""

    def __init__(self) -> None:
        # insertion order = admission order; None until scored. Finding the first of a dict passes
        # all that were deleted before it
        self._line: OrderedDict[int, AnySample | None] = OrderedDict()
        self._ready: deque[AnySample] = deque()
        self._closed = False
        self._event = asyncio.Event()
        self.waiting_for_score = 0
        """Admitted prompts that are neither scored nor dropped yet."""

    @property
    def ready(self) -> int:
        """Returns the number of samples at the front of the line that can be taken now."""
        return len(self._ready)

    @property
    def scored(self) -> int:
        """Returns the number of scored samples held, those behind an unfinished one included."""
        return len(self._ready) + len(self._line) - self.waiting_for_score

    @property
    def exhausted(self) -> bool:
        """Returns whether the buffer is closed and no prompt is unscored: `ready` cannot grow."""
        return self._closed and not self._line

    @property
    def closed(self) -> bool:
        """Returns whether admission has ended."""
        return self._closed

    def admit(self, uid: int, version: int) -> None:
        """Append a prompt to the line, admitted while `version` is live.

        Raises ValueError when it is already in it.
        """
        if self._closed:
            raise ValueError(f"prompt {uid} was admitted after the buffer was closed")
        if uid in self._line:
            raise ValueError(f"prompt {uid} was admitted twice")
        self._line[uid] = None
        self.waiting_for_score += 1

    def put(self, sample: AnySample) -> None:
        """Store the sample of an admitted prompt.

        Raises ValueError for an unknown or repeated one.
        """
        uid = sample.rollout.prompt.uid
        self._must_be_unfinished(uid)
        self._store(uid, sample)
        self.waiting_for_score -= 1
        self._advance()

    def drop(self, uid: int) -> None:
        """Remove a prompt that will have no sample; those behind it move up."""
        self._must_be_unfinished(uid)
        del self._line[uid]
        self.waiting_for_score -= 1
        self._advance()

    def withdraw(self, uids: Collection[int]) -> list[int]:
        """Remove the scored samples among `uids`; those behind move up.

        Returns the removed uids.
        """
        ready = [sample.rollout.prompt.uid for sample in self._ready]
        gone = [uid for uid in ready if uid in uids]
        if gone:
            kept = (s for s in self._ready if s.rollout.prompt.uid not in uids)
            self._ready = deque(kept)
        later = [uid for uid in uids if self._line.get(uid) is not None]
        for uid in later:
            del self._line[uid]
        self._advance()
        return gone + later

    def reopen(self, uid: int) -> AnySample | None:
        """Make a scored prompt wait for a sample again, in its place; return what it had.

        None: it is not held, or not scored. Admission is open again, as the prompt may be dropped.
        """
        line = dict(self.in_line())
        found = line.get(uid)
        if found is not None:
            self._closed = False
            self._renew(line | {uid: None})
            self.waiting_for_score += 1
        return found

    def put_back(self, samples: Sequence[AnySample]) -> None:
        """Take back the samples that the last `take` gave, to their places."""
        line = {s.rollout.prompt.uid: s for s in samples} | dict(self.in_line())
        self._renew(dict(sorted(line.items())))

    def close(self) -> None:
        """End admission: no more prompts are accepted."""
        self._closed = True
        self._advance()

    def open_again(self) -> None:
        """Let admission go on, as a sample that it counted on was dropped."""
        self._closed = False
        self._changed_now()

    def wake(self) -> None:
        """End every wait for a change, so that who waits looks for another reason to go on."""
        self._advance()

    def take(self, count: int) -> tuple[AnySample, ...]:
        """Remove and return the first `count` ready samples; ValueError when fewer are ready."""
        if count > len(self._ready):
            raise ValueError(f"{count} samples were asked for, {len(self._ready)} are ready")
        return tuple(self._ready.popleft() for _ in range(count))

    def in_line(self) -> list[tuple[int, AnySample | None]]:
        """Return everything held, in admission order; None for what is not scored yet."""
        ready = [(sample.rollout.prompt.uid, sample) for sample in self._ready]
        return [*ready, *self._line.items()]

    async def changed(self) -> None:
        """Wait for the next put, drop, withdrawal or close."""
        await self._event.wait()

    def _renew(self, line: dict[int, AnySample | None]) -> None:
        self._ready.clear()
        self._line = OrderedDict(line)
        self._advance()

    def _store(self, uid: int, sample: AnySample) -> None:
        self._line[uid] = sample

    def _must_be_unfinished(self, uid: int) -> None:
        if self._line.get(uid, self) is not None:
            raise ValueError(f"prompt {uid} is not waiting for a sample")

    def _advance(self) -> None:
        while self._line:
            uid = next(iter(self._line))
            sample = self._line[uid]
            if sample is None:
                break
            del self._line[uid]
            self._ready.append(sample)
        self._changed_now()

    def _changed_now(self) -> None:
        """End every wait for a change; later waiters wait for the next one."""
        self._event.set()
        self._event = asyncio.Event()
