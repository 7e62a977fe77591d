"""What each machine of a network test runs: `python -m tests.support.far_ends ROLE ...`.

Every role says one line when it is there, and does what its standard input says.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from checks.security.raw import Door
from checks.security.zmq_attacks import attacks
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.learner.channel import ControllerChannel
from megatron_opd.transport import messages as m
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.wire.keys import RunKeys
from tests.support.wire import config, hello

HEAD = SimpleNamespace(is_head=True, parallel=ParallelConfig())


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def keys_of(file: str) -> RunKeys:
    keys = RunKeys.read(Path(file))
    assert keys is not None
    return keys


def controller(file: str, host: str, port: str) -> None:
    """Send each line that comes in to the learner and back; at the end say what was refused."""

    async def main() -> None:
        tree = config(listen_host=host, listen_port=int(port), timeout_s=60.0)
        remote = RemoteLearner(tree, Admission(keys_of(file), {}, 512))
        say("listening")
        await remote.wait_ready(60)
        say("ready")
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            answer = await remote.move_weights(line.encode())
            say(answer.decode())
        await remote.stop()
        say(str(remote.frames_refused))

    asyncio.run(main())


def rank(file: str, host: str, port: str) -> None:
    """Join as a learner of one rank, and send every request's payload back."""
    channel = ControllerChannel(
        f"tcp://{host}:{port}", lambda: keys_of(file).ranks, first_s=60, max_bytes=2**20
    )
    channel.join(hello())
    say("welcome")
    while True:
        request, _ = channel.receive(HEAD)
        if isinstance(request, m.Stop):
            channel.leave()
            channel.reply(m.RankDone(request.call, m.Nothing()))
            break
        assert isinstance(request, m.MoveWeights)
        channel.reply(m.RankDone(request.call, m.WeightsMoved(request.payload)))
    channel.close()


def attacker(host: str, port: str, controller_public: str) -> None:
    """Each line is an attack's name and recorded bytes; say as JSON what became of it."""
    say("there")
    for line in sys.stdin:
        name, recorded = json.loads(line)
        door = Door(host, int(port))
        tried = attacks(door, controller_public.encode(), bytes.fromhex(recorded))
        outcome = tried[name]()
        say(json.dumps([outcome.closed, outcome.answer.hex(), outcome.sent]))


def sniffer(device: str, port: str, out: str) -> None:
    """Record what passes a device to and from `port` until the input ends: one file a sender.

    What has passed by then is read to its end: the socket may hold packets that are still unread.
    """
    heard: dict[tuple[str, int], dict[int, bytes]] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as tap:
        tap.bind((device, 0))
        tap.settimeout(0.2)
        over = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
        say("sniffing")
        while True:
            try:
                frame = tap.recv(1 << 18)
            except TimeoutError:
                if over.is_set():
                    break
                continue
            for sender, sport, dport, number, payload in segments(frame):
                if int(port) in (sport, dport):
                    heard.setdefault((sender, sport), {}).setdefault(number, payload)
    for (sender, sport), parts in heard.items():
        whole = b"".join(parts[number] for number in sorted(parts))
        (Path(out) / f"{sender}-{sport}").write_bytes(whole)


def segments(frame: bytes) -> Iterator[tuple[str, int, int, int, bytes]]:
    """The TCP payload of an Ethernet frame: sender, its port, the other, its number."""
    if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return
    length, head = struct.unpack(">H", frame[16:18])[0], (frame[14] & 15) * 4
    packet = frame[14 : 14 + length]
    sport, dport, number = struct.unpack(">HHI", packet[head : head + 8])
    payload = packet[head + (packet[head + 12] >> 4) * 4 :]
    if payload:
        yield socket.inet_ntoa(packet[12:16]), sport, dport, number, payload


ROLES = {"controller": controller, "rank": rank, "attacker": attacker, "sniffer": sniffer}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
