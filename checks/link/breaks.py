"""A link that is broken in every way, and what arrives over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import zmq

from checks.link.faults import Faults, never_send_again
from checks.link.proxy import Proxy
from checks.link.site import sample_of
from megatron_opd.config.sites import LinkConfig
from megatron_opd.wire.link.ends import LinkServer
from megatron_opd.wire.link.events import Received, Restarted
from megatron_opd.wire.link.wire import BULK, URGENT

TASKS, KILLS, SLOTS = 900, 10, 32
BIG_BYTES = 300_000
MOST_BYTES_TO_A_CUT = 1_500_000
LINK = {"heartbeat_s": 0.5, "silence_s": 3.0, "chunk_bytes": 1 << 18}
LIMIT_S = 300.0
STALL_S = 60.0
"""Time without an answer or a kill after which a run has stalled; the longest wait of the link for
a connection is far shorter."""
TELLING_S = 10.0
"""Time within which a site's process tells its counts."""
FAULTS = 0.1
"""Share of chunks of which something becomes, in each process."""
CONTROL_TASKS, CONTROL_LIMIT_S = 200, 15.0


@dataclass
class Hub:
    """Hands out tasks, and checks every number that comes."""

    link: LinkServer
    tasks: int
    pending: dict[int, bytes] = field(default_factory=dict)
    given: int = 0
    got: Counter[int] = field(default_factory=Counter)
    numbers: list[int] = field(default_factory=lambda: [0, 0])
    """Of the next order in each lane, since the other process started."""
    expected: int = 0
    lost: int = 0
    twice: int = 0
    wrong: int = 0
    big: int = 0
    site_faults: int = 0

    async def order(self, lane: int, **fields: object) -> None:
        """Send an order with its number."""
        text = json.dumps({"number": self.numbers[lane], **fields}).encode()
        self.numbers[lane] += 1
        body = random.randbytes(BIG_BYTES) if lane == BULK else b""
        await self.link.send("site", [text, body], lane)

    async def work(self) -> None:
        """Process events until every task has its sample."""
        while len(self.got) < self.tasks:
            event = await self.link.next()
            if isinstance(event, Restarted):
                await self.begin()
            elif isinstance(event, Received):
                await self.take(json.loads(bytes(event.parts[0])), bytes(event.parts[1]))

    async def begin(self) -> None:
        """Ask a new process for all that its forerunner owed."""
        self.numbers, self.expected = [0, 0], 0
        await self.order(BULK, kind="big")
        for uid in self.pending:
            await self.order(URGENT, kind="task", uid=uid)
        await self.fill()

    async def fill(self) -> None:
        """Give new tasks, up to the slots."""
        while len(self.pending) < SLOTS and self.given < self.tasks:
            uid, self.given = self.given, self.given + 1
            self.pending[uid] = sample_of(uid)
            await self.order(URGENT, kind="task", uid=uid)

    async def take(self, answer: dict[str, Any], body: bytes) -> None:
        """Check one answer."""
        self.lost += max(0, answer["number"] - self.expected)
        self.twice += answer["number"] < self.expected
        self.expected = answer["number"] + 1
        self.wrong += answer["wrong"]
        self.site_faults = max(self.site_faults, answer["faults"])
        if answer["kind"] == "big":
            self.big += 1
            await self.order(BULK, kind="big")
            return
        uid = answer["uid"]
        self.got[uid] += 1
        self.wrong += self.pending.pop(uid, body) != body
        await self.fill()


class Site:
    """Starts the site's process, and kills it."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self.starts = 0

    async def start(self) -> None:
        """Start a new process."""
        self.starts += 1
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "checks.link.site",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdin is not None
        told = self._told | {"seed": self.starts}
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        await self._process.stdin.drain()

    async def counts(self) -> dict[str, Any] | None:
        """Ask it for its link's counts, once; None where it does not tell them."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(TELLING_S):
                await self._process.stdout.readline()  # only now can it take the signal
                self._process.send_signal(signal.SIGUSR1)
                return json.loads(await self._process.stdout.readline())
        except (TimeoutError, ProcessLookupError, ValueError):
            return None

    async def kill(self) -> None:
        """Kill it at once, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


async def run(
    tasks: int, kills: int, limit_s: float, *, faults: float, never_again: bool
) -> dict[str, Any]:
    """Return what came of `tasks` tasks.

    stalled: what both ends counted where there was no progress for STALL_S, else None.
    """
    server_keys, site_keys = zmq.curve_keypair(), zmq.curve_keypair()
    link = LinkServer(
        "tcp://127.0.0.1:*",
        server_keys[1],
        {"site": site_keys[0]},
        LinkConfig.model_validate(LINK),
    )
    chance = random.Random(18)
    proxy = Proxy(
        int(link.address.rpartition(":")[2]),
        cut_after=lambda: chance.randint(1, MOST_BYTES_TO_A_CUT),
        flip=0.0 if never_again else 0.002,
    )
    told = {
        "address": await proxy.start(),
        "secret": site_keys[1].decode(),
        "server": server_keys[0].decode(),
        "link": LINK,
        "faults": faults,
        "never_again": never_again,
    }
    hub, site = Hub(link, tasks), Site(told)
    started_s = time.monotonic()
    await site.start()
    working = asyncio.create_task(hub.work())
    killed, site_faults = 0, 0
    stalled, seen, seen_s = None, (0, 0, 0), started_s
    while not working.done() and time.monotonic() - started_s < limit_s:
        await asyncio.sleep(0.02)
        now = (len(hub.got), hub.big, killed)
        if now != seen:
            seen, seen_s = now, time.monotonic()
        elif time.monotonic() - seen_s > STALL_S:
            stalled = {"server": asdict(link.counts("site")), "site": await site.counts()}
            break
        if killed < kills and len(hub.got) >= (killed + 1) * tasks // (kills + 1):
            await site.kill()
            killed += 1
            site_faults, hub.site_faults = site_faults + hub.site_faults, 0
            await site.start()
    finished = working.done()
    if finished:
        working.result()
    else:
        working.cancel()
    seconds = time.monotonic() - started_s
    await site.kill()
    counts = link.counts("site")
    await link.close()
    await proxy.close()
    return {
        "finished": finished,
        "stalled": stalled,
        "seconds": round(seconds, 1),
        "tasks": tasks,
        "samples": len(hub.got),
        "big_messages": hub.big,
        "lost": hub.lost + tasks - len(hub.got),
        "twice": hub.twice + sum(hub.got.values()) - len(hub.got),
        "wrong": hub.wrong,
        "kills": killed,
        "cuts": proxy.cuts,
        "bits_flipped_under_way": proxy.flips,
        "faults_of_the_site": site_faults + hub.site_faults,
        "mib_through_the_proxy": round(proxy.forwarded / 2**20, 1),
        "connections": counts.connections,
        "connections_refused": link.connections_refused,
        "bytes_again": counts.bytes_again,
        "refused": counts.refused,
    }


def with_faults() -> dict[str, Any]:
    """Return what came of tasks over a link with every fault."""
    harm = Faults(FAULTS, seed=0)
    with harm.installed():
        found = asyncio.run(run(TASKS, KILLS, LIMIT_S, faults=FAULTS, never_again=False))
    return found | {"faults_of_the_server": harm.done}


def without_resending() -> dict[str, Any]:
    """Return what is lost where nothing is sent again: cuts alone."""
    with never_send_again():
        return asyncio.run(run(CONTROL_TASKS, 0, CONTROL_LIMIT_S, faults=0.0, never_again=True))
