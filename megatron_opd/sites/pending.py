"""Assigns prompts to sites.

Invariants: a site is given no more prompts than it has slots, finished samples that it may still
hold included; a prompt that is asked for is with a site, or waits, until it is removed (answered,
or not wanted any more), whatever happens to sites; the responses of a group go to one site, unless
that is lost or quarantined before all of them are there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from megatron_opd.records.types import Prompt


@dataclass(slots=True)
class _SitePrompts:
    """Holds the prompts of one site.

    held: that it was given and has not answered. queue: that wait for one of its slots, as their
    group is there.
    """

    slots: int
    is_open: bool = True
    held: set[int] = field(default_factory=set[int])
    queue: deque[int] = field(default_factory=deque[int])


@dataclass(frozen=True, slots=True)
class Assignment:
    """Says that a prompt is to be sent to a site."""

    site: str
    prompt: Prompt


class PendingPrompts:
    """Assigns prompts; it sends nothing itself. group_size: G, responses of a prompt."""

    def __init__(self, group_size: int) -> None:
        self._size = group_size
        self._prompts: dict[int, Prompt] = {}
        self._sites: dict[str, _SitePrompts] = {}
        self._unassigned: OrderedDict[int, list[int]] = OrderedDict()
        self._site_of: dict[int, str] = {}
        self._members: Counter[int] = Counter()
        self._newest, self._newest_asked = -1, 0

    def __contains__(self, uid: int) -> bool:
        """Return whether a prompt is asked for and not removed."""
        return uid in self._prompts

    def prompt(self, uid: int) -> Prompt:
        """Return a prompt that is asked for."""
        return self._prompts[uid]

    def has(self, site: str, uid: int) -> bool:
        """Return whether a site was given a prompt, and has not answered."""
        own = self._sites.get(site)
        return own is not None and uid in own.held

    def count(self, site: str) -> int:
        """Return the number of prompts that a site was given and has not answered."""
        own = self._sites.get(site)
        return 0 if own is None else len(own.held)

    def holders(self, uid: int) -> list[str]:
        """Return the sites that were given a prompt and have not answered."""
        return [site for site, own in self._sites.items() if uid in own.held]

    @property
    def waiting(self) -> int:
        """Returns how many prompts are with no site."""
        queued = sum(len(own.queue) for own in self._sites.values())
        return queued + sum(map(len, self._unassigned.values()))

    # ------------------------------------------------------------ prompts

    def ask(self, prompt: Prompt) -> list[Assignment]:
        """Take a prompt; returns what is to be sent now. ValueError: asked twice."""
        uid, group = prompt.uid, prompt.uid // self._size
        if uid in self._prompts:
            raise ValueError(f"prompt {uid} was asked for twice")
        self._prompts[uid] = prompt
        self._members[group] += 1
        if group > self._newest:
            former, self._newest, self._newest_asked = self._newest, group, 0
            self._forget_group_if_done(former)
        if group == self._newest:
            self._newest_asked += 1
        if any(uid in own.held for own in self._sites.values()):
            return []  # a site that came back has it
        return self._assign_all([uid])

    def remove(self, uid: int) -> list[str]:
        """Remove a prompt that is answered or not wanted; returns the sites that still have it."""
        if self._prompts.pop(uid, None) is None:
            return []
        group = uid // self._size
        self._members[group] -= 1
        if not self._members[group]:
            del self._members[group]
            self._forget_group_if_done(group)
        self._unqueue(uid)
        holders = self.holders(uid)
        for site in holders:
            self._sites[site].held.discard(uid)
        return holders

    def take_from(self, site: str, uid: int) -> list[Assignment]:
        """Note that a site has answered a prompt, or forgotten it; others get what it has not done.

        Returns what is to be sent now.
        """
        own = self._sites[site]
        own.held.discard(uid)
        if uid in self._prompts and not self.holders(uid) and not self._is_queued(uid):
            return self._assign_all([uid])
        return self.fill()

    # ------------------------------------------------------------ sites

    def join(self, site: str, slots: int, holds: Collection[int]) -> list[Assignment]:
        """Take in a site, also one that comes back; returns what is to be sent to sites now.

        holds: what it has of what is wanted. What it was given and has no more is assigned anew.
        """
        own = self._sites.get(site)
        had: set[int] = set()
        if own is None:
            own = self._sites[site] = _SitePrompts(slots)
        else:
            had = own.held - set(holds)
        own.slots, own.is_open, own.held = slots, True, set(holds)
        for uid in holds:
            self._unqueue(uid)
        return self._assign_all(self._without_a_site(had)) + self.fill()

    def pause(self, site: str) -> None:
        """Give a site nothing more for now; it keeps what it has."""
        if site in self._sites:
            self._sites[site].is_open = False

    def resume(self, site: str) -> list[Assignment]:
        """Give a site prompts again; returns what is to be sent now.

        What it still has is not given to others any more, if it was not yet.
        """
        own = self._sites.get(site)
        if own is not None:
            own.is_open = True
            for uid in own.held:
                self._unqueue(uid)
        return self.fill()

    def lose(self, site: str, *, for_good: bool) -> list[Assignment]:
        """Give a site's prompts to others; returns what is to be sent now.

        for_good: it has none of them any more. Else what it answers still counts, if it is first.
        """
        own = self._sites.get(site)
        if own is None:
            return []
        own.is_open = False
        again = sorted({*own.held, *own.queue})
        own.queue.clear()
        for group in [group for group, owner in self._site_of.items() if owner == site]:
            del self._site_of[group]
        if for_good:
            del self._sites[site]
            again = self._without_a_site(again)
        else:
            elsewhere = [uid for uid in again if self.holders(uid) not in ([], [site])]
            again = [uid for uid in again if uid not in elsewhere and not self._is_queued(uid)]
        return self._assign_all([uid for uid in again if uid in self._prompts])

    # ------------------------------------------------------------ who gets what

    def fill(self) -> list[Assignment]:
        """Give waiting prompts to free slots; returns what is to be sent now."""
        given: list[Assignment] = []
        for site, own in self._sites.items():
            while own.is_open and len(own.held) < own.slots and own.queue:
                given.append(self._assign(site, own.queue.popleft()))
        while self._unassigned and (site := self._freest()) is not None:
            group, uids = self._unassigned.popitem(last=False)
            given += self._assign_group(group, uids, site)
        return given

    def _assign_all(self, uids: Iterable[int]) -> list[Assignment]:
        """Let prompts wait, older ones first, then give what can be given."""
        given: list[Assignment] = []
        for uid in uids:
            group = uid // self._size
            site = self._site_of.get(group)
            if site is not None:
                given += self._assign_group(group, [uid], site)
            else:
                self._unassigned.setdefault(group, []).append(uid)
                if group != self._newest:  # lost and given again: older than all that wait
                    self._unassigned.move_to_end(group, last=False)
        return given + self.fill()

    def _assign_group(self, group: int, uids: Iterable[int], site: str) -> list[Assignment]:
        self._site_of[group] = site
        own, given = self._sites[site], list[Assignment]()
        for uid in uids:
            if own.is_open and len(own.held) < own.slots and not own.queue:
                given.append(self._assign(site, uid))
            else:
                own.queue.append(uid)
        return given

    def _assign(self, site: str, uid: int) -> Assignment:
        self._sites[site].held.add(uid)
        return Assignment(site, self._prompts[uid])

    def _freest(self) -> str | None:
        """Return the site with most free slots, None where there is none."""
        best, most = None, 0
        for site, own in self._sites.items():
            free = own.slots - len(own.held) - len(own.queue)
            if self._site_of.get(self._newest) == site:
                free -= self._size - self._newest_asked  # the rest of its group will come
            if own.is_open and free > most:
                best, most = site, free
        return best

    def _without_a_site(self, uids: Iterable[int]) -> list[int]:
        return sorted(
            uid
            for uid in uids
            if uid in self._prompts and not self.holders(uid) and not self._is_queued(uid)
        )

    def _is_queued(self, uid: int) -> bool:
        if uid in self._unassigned.get(uid // self._size, ()):
            return True
        return any(uid in own.queue for own in self._sites.values())

    def _unqueue(self, uid: int) -> None:
        group = uid // self._size
        waiting = self._unassigned.get(group, [])
        if uid in waiting:
            waiting.remove(uid)
            if not waiting:
                del self._unassigned[group]
        for own in self._sites.values():
            if uid in own.queue:
                own.queue.remove(uid)

    def _forget_group_if_done(self, group: int) -> None:
        """Forget the site of a group none of whose members is pending, nor will be asked for."""
        if group != self._newest and group not in self._members:
            self._site_of.pop(group, None)
