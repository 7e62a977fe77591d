"""One end of a measured link: `python -m checks.link.mover receive|send`.

It reads one line of JSON. The receiver prints its address, and answers every message; the sender
prints its figures. Both print the processor time that they took.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from typing import Any

from checks.link.payloads import PAYLOADS
from megatron_opd.config.sites import LinkConfig
from megatron_opd.wire.link.ends import LinkClient, LinkServer
from megatron_opd.wire.link.events import Received
from megatron_opd.wire.link.wire import BULK, URGENT

MESSAGE_BYTES = 32 << 20
WARM_UP_BYTES = 4 << 20
URGENT_EVERY_S = 0.1
END = b"end"


def cpu_s() -> float:
    """Processor time of this process, its threads included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def say(figures: dict[str, Any]) -> None:
    """Print one line for whoever measures."""
    print(json.dumps(figures), flush=True)


async def receive(told: dict[str, Any]) -> None:
    """Answer each message with its lane and size."""
    link = LinkServer(
        f"tcp://{told['host']}:*",
        told["secret"].encode(),
        {"sender": told["peer"].encode()},
        LinkConfig.model_validate(told["link"]),
    )
    say({"address": link.address})
    started_s = None
    while True:
        event = await link.next()
        if not isinstance(event, Received):
            continue
        size = sum(len(part) for part in event.parts)
        if event.lane == URGENT and bytes(event.parts[0]) == END:
            break
        await link.send("sender", [json.dumps([event.lane, size]).encode()])
        started_s = cpu_s() if started_s is None else started_s
    assert started_s is not None
    say({"cpu_s": cpu_s() - started_s})
    await link.close(linger_s=1.0)


class Sender:
    """Sends big messages one behind another, and small urgent ones meanwhile."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self.link = LinkClient(
            told["address"],
            told["secret"].encode(),
            told["peer"].encode(),
            LinkConfig.model_validate(told["link"]),
        )
        self._asked_s: list[float] = []
        self.waits_s: list[float] = []
        self._arrived = 0
        self._changed = asyncio.Event()

    async def listen(self) -> None:
        """Take the receiver's answers."""
        while True:
            event = await self.link.next()
            if isinstance(event, Received):
                lane, size = json.loads(bytes(event.parts[0]))
                if lane == URGENT:
                    self.waits_s.append(time.monotonic() - self._asked_s.pop(0))
                self._arrived += size if lane == BULK else 0
                self._changed.set()

    async def arrived(self, num_bytes: int) -> None:
        """Wait until so many bytes of big messages were answered."""
        while self._arrived < num_bytes:
            self._changed.clear()
            await self._changed.wait()

    async def ask(self) -> None:
        """Send small urgent messages, one a time."""
        while True:
            self._asked_s.append(time.monotonic())
            await self.link.send([b"urgent"])
            await asyncio.sleep(URGENT_EVERY_S)

    async def measure(self) -> dict[str, Any]:
        """Return the figures of one payload."""
        told = self._told
        data = PAYLOADS[told["payload"]](min(MESSAGE_BYTES, told["num_bytes"]))
        tasks = [asyncio.create_task(self.listen())]
        await self.link.send([data[:WARM_UP_BYTES]], BULK)
        await self.arrived(min(WARM_UP_BYTES, len(data)))
        self._arrived = 0
        tasks.append(asyncio.create_task(self.ask()))
        before, cpu_before_s, started_s = self.link.counts(), cpu_s(), time.monotonic()
        sent = 0
        while sent < told["num_bytes"]:
            await self.link.send([data], BULK)
            sent += len(data)
        await self.arrived(sent)
        seconds = time.monotonic() - started_s
        wire = self.link.counts().wire_bytes_sent - before.wire_bytes_sent
        used_s = cpu_s() - cpu_before_s
        for task in tasks:
            task.cancel()
        await self.link.send([END])
        await self.link.close(linger_s=5.0)
        waits_ms = sorted(1000 * wait for wait in self.waits_s)
        return {
            "bytes": sent,
            "wire_bytes": wire,
            "seconds": seconds,
            "cpu_s": used_s,
            "urgent_ms": [waits_ms[len(waits_ms) // 2], waits_ms[-1]] if waits_ms else None,
        }


async def main() -> None:
    """Run as the end that the command names."""
    told = json.loads(sys.stdin.readline())
    if sys.argv[1] == "receive":
        await receive(told)
    else:
        say(await Sender(told).measure())


if __name__ == "__main__":
    asyncio.run(main())
