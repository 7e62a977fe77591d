"""Knows which site has which prompt, and to whom the next one goes.

Invariants: a site is given no more prompts than it has slots, finished samples that it may still
hold included; a prompt that is asked for is with a site, or waits, until it is settled, whatever
happens to sites; the responses of a group go to one site, unless that is lost or quarantined before
all of them are there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from megatron_opd.records.types import Prompt


@dataclass(slots=True)
class _Place:
    """Holds a site's part.

    held: prompts that it was given and has not answered. queue: that wait for one of its slots, as
    their group is there.
    """

    slots: int
    is_open: bool = True
    held: set[int] = field(default_factory=set[int])
    queue: deque[int] = field(default_factory=deque[int])


@dataclass(frozen=True, slots=True)
class Gift:
    """Says that a prompt is to be sent to a site."""

    site: str
    prompt: Prompt


class Pending:
    """Shares prompts out; it sends nothing itself. group_size: G, responses of a prompt."""

    def __init__(self, group_size: int) -> None:
        self._size = group_size
        self._prompts: dict[int, Prompt] = {}
        self._places: dict[str, _Place] = {}
        self._unbound: OrderedDict[int, list[int]] = OrderedDict()
        self._site_of: dict[int, str] = {}
        self._members: Counter[int] = Counter()
        self._newest, self._newest_asked = -1, 0

    def __contains__(self, uid: int) -> bool:
        """Return whether a prompt is asked for and not settled."""
        return uid in self._prompts

    def prompt(self, uid: int) -> Prompt:
        """Return a prompt that is asked for."""
        return self._prompts[uid]

    def has(self, site: str, uid: int) -> bool:
        """Return whether a site was given a prompt, and has not answered."""
        place = self._places.get(site)
        return place is not None and uid in place.held

    def count(self, site: str) -> int:
        """Return the number of prompts that a site was given and has not answered."""
        place = self._places.get(site)
        return 0 if place is None else len(place.held)

    def holders(self, uid: int) -> list[str]:
        """Return the sites that were given a prompt and have not answered."""
        return [site for site, place in self._places.items() if uid in place.held]

    @property
    def waiting(self) -> int:
        """Returns how many prompts are with no site."""
        queued = sum(len(place.queue) for place in self._places.values())
        return queued + sum(map(len, self._unbound.values()))

    # ------------------------------------------------------------ prompts

    def ask(self, prompt: Prompt) -> list[Gift]:
        """Take a prompt to share out; returns what is to be sent now. ValueError: asked twice."""
        uid, group = prompt.uid, prompt.uid // self._size
        if uid in self._prompts:
            raise ValueError(f"prompt {uid} was asked for twice")
        self._prompts[uid] = prompt
        self._members[group] += 1
        if group > self._newest:
            former, self._newest, self._newest_asked = self._newest, group, 0
            self._unbind_if_done(former)
        if group == self._newest:
            self._newest_asked += 1
        if any(uid in place.held for place in self._places.values()):
            return []  # a site that came back has it
        return self._share_out([uid])

    def settle(self, uid: int) -> list[str]:
        """Remove a prompt that is answered or not wanted; returns the sites that still have it."""
        if self._prompts.pop(uid, None) is None:
            return []
        group = uid // self._size
        self._members[group] -= 1
        if not self._members[group]:
            del self._members[group]
            self._unbind_if_done(group)
        self._unqueue(uid)
        holders = self.holders(uid)
        for site in holders:
            self._places[site].held.discard(uid)
        return holders

    def take_from(self, site: str, uid: int) -> list[Gift]:
        """Note that a site has answered a prompt, or forgotten it; others get what it has not done.

        Returns what is to be sent now.
        """
        place = self._places[site]
        place.held.discard(uid)
        if uid in self._prompts and not self.holders(uid) and not self._is_queued(uid):
            return self._share_out([uid])
        return self.fill()

    # ------------------------------------------------------------ sites

    def join(self, site: str, slots: int, holds: Collection[int]) -> list[Gift]:
        """Take in a site, also one that comes back; returns what is to be sent to sites now.

        holds: what it has of what is wanted. What it was given and has no more is shared out.
        """
        place = self._places.get(site)
        had: set[int] = set()
        if place is None:
            place = self._places[site] = _Place(slots)
        else:
            had = place.held - set(holds)
        place.slots, place.is_open, place.held = slots, True, set(holds)
        for uid in holds:
            self._unqueue(uid)
        return self._share_out(self._without_a_site(had)) + self.fill()

    def pause(self, site: str) -> None:
        """Give a site nothing more for now; it keeps what it has."""
        if site in self._places:
            self._places[site].is_open = False

    def resume(self, site: str) -> list[Gift]:
        """Give a site prompts again; returns what is to be sent now.

        What it still has is not given to others any more, if it was not yet.
        """
        place = self._places.get(site)
        if place is not None:
            place.is_open = True
            for uid in place.held:
                self._unqueue(uid)
        return self.fill()

    def lose(self, site: str, *, for_good: bool) -> list[Gift]:
        """Give a site's prompts to others; returns what is to be sent now.

        for_good: it has none of them any more. Else what it answers still counts, if it is first.
        """
        place = self._places.get(site)
        if place is None:
            return []
        place.is_open = False
        again = sorted({*place.held, *place.queue})
        place.queue.clear()
        for group in [group for group, owner in self._site_of.items() if owner == site]:
            del self._site_of[group]
        if for_good:
            del self._places[site]
            again = self._without_a_site(again)
        else:
            elsewhere = [uid for uid in again if self.holders(uid) not in ([], [site])]
            again = [uid for uid in again if uid not in elsewhere and not self._is_queued(uid)]
        return self._share_out([uid for uid in again if uid in self._prompts])

    # ------------------------------------------------------------ who gets what

    def fill(self) -> list[Gift]:
        """Give waiting prompts to free slots; returns what is to be sent now."""
        given: list[Gift] = []
        for site, place in self._places.items():
            while place.is_open and len(place.held) < place.slots and place.queue:
                given.append(self._give(site, place.queue.popleft()))
        while self._unbound and (site := self._freest()) is not None:
            group, uids = self._unbound.popitem(last=False)
            given += self._bind(group, uids, site)
        return given

    def _share_out(self, uids: Iterable[int]) -> list[Gift]:
        """Let prompts wait, older ones first, then give what can be given."""
        given: list[Gift] = []
        for uid in uids:
            group = uid // self._size
            site = self._site_of.get(group)
            if site is not None:
                given += self._bind(group, [uid], site)
            else:
                self._unbound.setdefault(group, []).append(uid)
                if group != self._newest:  # lost and given again: older than all that wait
                    self._unbound.move_to_end(group, last=False)
        return given + self.fill()

    def _bind(self, group: int, uids: Iterable[int], site: str) -> list[Gift]:
        self._site_of[group] = site
        place, given = self._places[site], list[Gift]()
        for uid in uids:
            if place.is_open and len(place.held) < place.slots and not place.queue:
                given.append(self._give(site, uid))
            else:
                place.queue.append(uid)
        return given

    def _give(self, site: str, uid: int) -> Gift:
        self._places[site].held.add(uid)
        return Gift(site, self._prompts[uid])

    def _freest(self) -> str | None:
        """Return the site with most free slots, None where there is none."""
        best, most = None, 0
        for site, place in self._places.items():
            free = place.slots - len(place.held) - len(place.queue)
            if self._site_of.get(self._newest) == site:
                free -= self._size - self._newest_asked  # the rest of its group will come
            if place.is_open and free > most:
                best, most = site, free
        return best

    def _without_a_site(self, uids: Iterable[int]) -> list[int]:
        return sorted(
            uid
            for uid in uids
            if uid in self._prompts and not self.holders(uid) and not self._is_queued(uid)
        )

    def _is_queued(self, uid: int) -> bool:
        if uid in self._unbound.get(uid // self._size, ()):
            return True
        return any(uid in place.queue for place in self._places.values())

    def _unqueue(self, uid: int) -> None:
        group = uid // self._size
        waiting = self._unbound.get(group, [])
        if uid in waiting:
            waiting.remove(uid)
            if not waiting:
                del self._unbound[group]
        for place in self._places.values():
            if uid in place.queue:
                place.queue.remove(uid)

    def _unbind_if_done(self, group: int) -> None:
        """Forget the site of a group none of whose members is pending, nor will be asked for."""
        if group != self._newest and group not in self._members:
            self._site_of.pop(group, None)
