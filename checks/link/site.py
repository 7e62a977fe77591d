"""The process of a site that is killed and started again: `python -m checks.link.site`.

It reads one line of JSON, then answers tasks with the bytes that their uid stands for, and big
messages with their number. Every message that it sends is numbered from the start of the process.
It prints an empty record once SIGUSR1 makes it print the counts of its link.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from dataclasses import asdict
from typing import Any

from checks.link.faults import Faults, never_send_again
from megatron_opd.config.sites import LinkConfig
from megatron_opd.wire.link.ends import LinkClient
from megatron_opd.wire.link.events import Received
from megatron_opd.wire.link.wire import BULK


def sample_of(uid: int) -> bytes:
    """The bytes that a uid stands for: what is lost or mixed up shows."""
    chance = random.Random(uid)
    return chance.randbytes(chance.randint(100, 60_000))


async def serve(told: dict[str, Any]) -> None:
    """Work until killed, or told to end."""
    faults = Faults(told["faults"], told["seed"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(faults.installed())
        if told["never_again"]:
            stack.enter_context(never_send_again())
        await work(told, faults)


async def work(told: dict[str, Any], faults: Faults) -> None:
    """Answer every order."""
    link = LinkClient(
        told["address"],
        told["secret"].encode(),
        told["server"].encode(),
        LinkConfig.model_validate(told["link"]),
    )
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGUSR1, lambda: print(json.dumps(asdict(link.counts())), flush=True)
    )
    print("{}", flush=True)
    sent = 0
    expected = [0, 0]
    wrong = 0
    while True:
        event = await link.next()
        if not isinstance(event, Received):
            continue
        order = json.loads(bytes(event.parts[0]))
        wrong += order["number"] != expected[event.lane]
        expected[event.lane] = order["number"] + 1
        if order["kind"] == "end":
            break
        answer = {"kind": order["kind"], "number": sent, "uid": order.get("uid"), "wrong": wrong}
        answer["faults"] = sum(faults.done.values())
        body = b"" if event.lane == BULK else sample_of(order["uid"])
        await link.send([json.dumps(answer).encode(), body])
        sent += 1
    await link.close(linger_s=5.0)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.stdin.readline())))
