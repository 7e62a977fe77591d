"""Pulls versions of the weights over the link into a site's mirror, at the link's own pace.

One version is pulled at a time, by ranges of bytes, a few of which are asked for at once. The
newest version that is offered is the goal; what it is based on comes first. A version that began to
arrive is pulled to its end while the learner still has it, however many newer ones there are: a
slow link falls behind by whole versions and still gets some.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_opd.buffer.delays import DelayStream
from megatron_opd.sites.messages import FilePiece, FileSize, Offer, Want, encode
from megatron_opd.sites.mirror import BadBytes, BadOffer, Mirror, check_offer
from megatron_opd.sites.ports import SiteLink
from sglang_bridge.weights.manifest import order

RANGE_BYTES = 4 << 20
"""Largest range that is asked for."""
WINDOW = 4
"""Ranges that are asked for at once."""
TRIES = 5
"""A version is given up after it arrived damaged so often; the next one is pulled."""


class _Removed(Exception):
    """Reports that the learner has removed a version that was being pulled."""


@dataclass(eq=False)
class _Range:
    """Holds a range that was asked for. data: None until it is here."""

    file: FileSize
    start: int
    stop: int
    data: memoryview | None = None


class Pulls:
    """Pulls the versions of one run.

    Args:
        mirror: where they are put.
        link: to the learner.
        delays: for how long offers are not acted on, for studies.
        say: tells the user.

    num_bytes: that arrived. refused: what arrived and was not taken, counted by why.
    """

    def __init__(
        self,
        mirror: Mirror,
        link: SiteLink,
        delays: DelayStream,
        say: Callable[[str], None],
    ) -> None:
        self._mirror, self._link, self._delays, self._say = mirror, link, delays, say
        # all offers, and the names of those that are not held back by a delay
        self._offers: dict[str, Offer] = {}
        self._due: set[str] = set()
        self._is_delayed, self._num_delays = False, 0
        self._asked: deque[_Range] = deque()
        self._pulled: str | None = None
        self._is_missing = False
        self._moved = asyncio.Event()
        self._whole = asyncio.Condition()
        self._has_due = asyncio.Event()
        self._has_offers = False
        self.in_use: set[str] = set()
        """Versions that servers hold or read, which stay in the mirror."""
        self.num_bytes = 0
        self.refused: Counter[str] = Counter()

    # ------------------------------------------------------------ what the learner sends

    def offered(self, offer: Offer) -> None:
        """Note that a version can be pulled. BadOffer: it is none."""
        check_offer(offer)
        self._offers[offer.name], self._has_offers = offer, True
        if not self._is_delayed:
            self._begin_delay()

    def _begin_delay(self) -> None:
        """Let a delay pass before what is offered may be pulled, and then the next one.

        So HeteroRL has it (sec. 4.1): a site loads the newest version whenever its delay has
        elapsed. Were each version held back by itself, the one with the shortest delay would win.
        """
        wait_s = self._delays.seconds(self._num_delays)
        self._num_delays += 1
        self._is_delayed = wait_s > 0
        if self._is_delayed:
            asyncio.get_running_loop().call_later(wait_s, self._end_delay)
        else:
            self._offers_due()

    def _end_delay(self) -> None:
        self._offers_due()
        self._begin_delay()

    def arrived(self, piece: FilePiece, data: bytes | memoryview) -> None:
        """Take bytes that were asked for; others are counted and change nothing."""
        for each in self._asked:
            is_it = (piece.name, piece.file) == (self._pulled, each.file.name)
            if is_it and piece.start == each.start and each.data is None:
                if len(data) == each.stop - each.start:
                    each.data = memoryview(data)
                    self.num_bytes += len(data)
                    self._moved.set()
                    return
                break
        self.refused["piece_not_asked_for"] += 1

    def missing(self, name: str) -> None:
        """Note that a version was removed."""
        self._offers.pop(name, None)
        if name == self._pulled:
            self._is_missing = True
            self._moved.set()

    # ------------------------------------------------------------ pulling

    @property
    def goal(self) -> str | None:
        """Returns the newest version that is offered and not held back."""
        return max(self._due & self._offers.keys(), key=order, default=None)

    @property
    def has_offers(self) -> bool:
        """Returns whether any version was offered, held back or not."""
        return self._has_offers

    async def first(self) -> str:
        """Return the newest whole version, once it is no older than what was offered first."""
        await self._has_due.wait()
        goal = self.goal
        place = 0 if goal is None else order(goal)
        return await self._newest_from(place)

    async def newer(self, than: str) -> str:
        """Return the newest whole version in the mirror, once that is newer than `than`."""
        return await self._newest_from(order(than) + 1)

    async def _newest_from(self, place: int) -> str:
        def found() -> bool:
            newest = self._mirror.newest
            return newest is not None and order(newest) >= place

        async with self._whole:
            await self._whole.wait_for(found)
        newest = self._mirror.newest
        assert newest is not None
        return newest

    async def run(self) -> None:
        """Pull whatever is offered, until cancelled. OSError: the mirror cannot be written."""
        damaged: Counter[str] = Counter()
        while True:
            offer = self._next()
            if offer is None:
                self._moved.clear()
                await self._moved.wait()
                continue
            try:
                await self._pull(offer)
                await asyncio.to_thread(self._mirror.finish, offer)
            except _Removed:
                self._mirror.keep(self._kept())
            except BadBytes as error:
                self.refused[error.kind] += 1
                damaged[offer.name] += 1
                self._say(f"{error}; it is pulled again")
                if damaged[offer.name] >= TRIES:
                    self._give_up(offer, f"it arrived damaged {TRIES} times")
            except BadOffer as error:
                self._give_up(offer, str(error))
            else:
                await self._finished(offer)

    def _offers_due(self) -> None:
        self._due |= self._offers.keys()
        self._has_due.set()
        self._moved.set()

    def _next(self) -> Offer | None:
        """Return what is to be pulled now: the newest version, or first what it is based on."""
        newest = self._mirror.newest
        for goal in sorted(self._due & self._offers.keys(), key=order, reverse=True):
            if newest is not None and order(goal) <= order(newest):
                return None
            found: Offer | None = None
            name: str | None = goal
            while name is not None and not self._mirror.has(name):
                found = self._offers.get(name)
                if found is None:
                    break  # its base is gone: one before it may still be whole
                name = found.base
            else:
                return found
        return None

    async def _pull(self, offer: Offer) -> None:
        """Pull all bytes of a version into the mirror. _Removed, OSError."""
        self._pulled, self._is_missing = offer.name, False
        ranges = self._ranges(offer)
        try:
            while True:
                while len(self._asked) < WINDOW and (each := next(ranges, None)) is not None:
                    self._asked.append(each)
                    want = Want(offer.name, each.file.name, each.start, each.stop)
                    await self._link.send([encode(want)])
                if self._is_missing:
                    raise _Removed
                if not self._asked:
                    return
                if not self._store(offer):
                    self._moved.clear()
                    await self._moved.wait()
        finally:
            self._asked.clear()
            self._pulled = None

    def _store(self, offer: Offer) -> bool:
        """Write what is here, in order, whatever the order of arrival; tell whether it is any."""
        before = len(self._asked)
        while self._asked and (data := self._asked[0].data) is not None:
            first = self._asked.popleft()
            self._mirror.append(offer, first.file, first.start, data)
        return len(self._asked) < before

    def _ranges(self, offer: Offer) -> Iterator[_Range]:
        """Yield what is not here yet, in order."""
        for file in offer.files:
            there = self._mirror.there(offer, file)
            for start in range(there, file.num_bytes, RANGE_BYTES):
                yield _Range(file, start, min(start + RANGE_BYTES, file.num_bytes))

    async def _finished(self, offer: Offer) -> None:
        self._mirror.keep(self._kept())
        newest = order(offer.name)
        chain = set(self._mirror.chain(offer.name))
        self._offers = {
            name: each
            for name, each in self._offers.items()
            if order(name) > newest or name in chain
        }
        self._due &= self._offers.keys()
        async with self._whole:
            self._whole.notify_all()

    def _kept(self) -> set[str]:
        newest = self._mirror.newest
        return self.in_use if newest is None else {*self.in_use, newest}

    def _give_up(self, offer: Offer, why: str) -> None:
        self.refused["version"] += 1
        self._offers.pop(offer.name, None)
        self._say(f"version {offer.name} is given up: {why}")
