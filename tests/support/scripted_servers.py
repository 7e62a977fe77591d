"""Servers, their transport and a learner that follow a script, for tests of weight syncs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_bridge import wire
from sglang_bridge.protocol import WeightPiece

A, B, C, D = "http://a:1", "http://b:2", "http://c:3", "http://d:4"
Fault = Callable[["Servers"], Exception | None]


class Servers:
    """Servers that a transport reaches at once. lost: those that answer nothing any more.

    faults: by step, asked each time the step is taken: what it raises.
    """

    def __init__(self, urls: tuple[str, ...] = (A, B, C)) -> None:
        self.urls = urls
        self.silent: tuple[str, ...] = ()
        self.lost: set[str] = set()
        self.faults: dict[str, Fault] = {}
        self.log: list[str] = []
        self.held = dict.fromkeys(urls, 0)
        self.version = dict.fromkeys(urls, 0)
        self.samples = dict.fromkeys(urls, True)
        self.updating: set[str] = set()
        self.connected: tuple[str, ...] = ()
        self.staged = 0
        self.epoch = 0
        self.waiting: list[str] = []
        self.given_up: dict[str, set[str]] = {url: set() for url in urls}
        """Tags of the memory that each has released."""
        self.frees: frozenset[str] = frozenset()

    async def step(self, name: str, act: Callable[[str], None] = lambda url: None) -> None:
        """Every server does it, unless the step fails before; a lost one lets all others wait."""
        self.log.append(name)
        await asyncio.sleep(0.1)
        if (error := self.faults.get(name, lambda _: None)(self)) is not None:
            raise error
        for url in self.urls:
            if url not in self.lost:
                act(url)
        if (silent := tuple(url for url in self.urls if url in self.lost)) != ():
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:
                self.silent = silent
                raise

    def drop(self, url: str) -> None:
        self.urls = tuple(other for other in self.urls if other != url)
        self.epoch += 1
        self.log.append(f"drop {url}")

    def add(self, url: str) -> None:
        """One that was lost is back, with the weights that it started with."""
        self.lost.discard(url)
        self.updating.discard(url)
        self.waiting.append(url)
        self.held[url] = self.version[url] = 0
        self.samples[url] = False
        self.given_up[url] = set()

    # the transport
    tensors = frozenset({"w"})
    num_bytes = 4
    stages = True

    async def open(self) -> None:
        self.connected = self.urls
        await self.step("open")

    async def reopen(self) -> None:
        self.connected = self.urls
        await self.step("reopen")

    async def start(self, version: int, released: Callable[[], None] | None) -> None:
        await self.step("start")
        if released is not None:
            released()

    async def stage(self, version: int) -> None:
        assert self.connected == self.urls, "it sends to servers that are not there"
        await self.step("stage")
        self.staged = version

    async def send(self, version: int) -> None:
        assert not any(self.samples[url] for url in self.urls if url not in self.lost)
        await self.step("send", lambda url: self.held.update({url: version}))

    async def close(self) -> None:
        await self.step("close")

    # the fleet
    async def let_in(self) -> None:
        while not (self.urls or self.waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self.epoch += bool(self.waiting)
        self.urls, self.waiting = (*self.urls, *self.waiting), []

    @property
    def none_serves(self) -> bool:
        return bool(self.waiting) and not any(self.samples[url] for url in self.urls)

    async def until_none_serves(self) -> None:
        while not self.none_serves:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def versions(self) -> Mapping[str, int]:
        await self.step("versions")
        return {url: self.version[url] for url in self.urls}

    async def pause(self, mode: str = "retract") -> None:
        await self.step("pause", lambda url: self.samples.update({url: False}))

    async def resume(self) -> None:
        await self.step("continue", lambda url: self.samples.update({url: True}))

    async def flush_cache(self) -> None:
        await self.step("flush")

    async def begin_weight_update(self) -> None:
        def begin(url: str) -> None:
            assert url not in self.updating, "an update is open already"
            self.updating.add(url)

        await self.step("begin", begin)

    async def end_weight_update(self, version: int) -> None:
        def end(url: str) -> None:
            self.updating.remove(url)
            self.version[url] = version

        await self.step("end", end)

    async def weight_digests(self, *, staged: bool = False) -> Mapping[str, list[WeightPiece]]:
        await self.step("verify" if staged else "verify live")
        held = dict.fromkeys(self.urls, self.staged) if staged else self.held
        return {url: [WeightPiece(0, "w", 0, 0, 1, "float32", str(held[url]))] for url in self.urls}

    async def release_memory(self) -> Mapping[str, frozenset[str]]:
        await self.step("release", lambda url: self.given_up[url].update(wire.MEMORY_TAGS))
        return dict.fromkeys(self.urls, self.frees)

    async def resume_memory(self, tags: Sequence[str] = wire.MEMORY_TAGS) -> None:
        def back(url: str) -> None:
            self.given_up[url].difference_update(tags)

        await self.step(f"resume {' '.join(tags)}", back)

    async def restore_memory(self, urls: Sequence[str], limit_s: float) -> Mapping[str, str]:
        self.log.append(f"restore {' '.join(urls)}")
        for url in urls:
            if url not in self.lost:
                self.given_up[url].clear()
        return {url: "no answer" for url in urls if url in self.lost}

    async def abort_all(self) -> None:
        await self.step("abort")

    async def abandon_weight_update(self, limit_s: float) -> Mapping[str, str]:
        self.log.append("abandon")
        for url in self.urls:
            if url not in self.lost:
                self.samples[url] = False
                self.updating.discard(url)
                self.given_up[url].clear()
        gone = [url for url in self.urls if url in self.lost]
        await asyncio.sleep(limit_s if gone else 0.1)
        return dict.fromkeys(gone, "no answer")


class Learner:
    """Holds version 1, whatever was asked for."""

    async def piece_digests(self, pieces: Any) -> list[str]:
        return ["1" for _ in pieces]


def loser(servers: Servers, least: int) -> Callable[[str, str], bool]:
    def lose(url: str, why: str) -> bool:
        if len(servers.urls) <= least:
            return False
        servers.drop(url)
        return True

    return lose
