"""How much a link carries: by its own limit, in networks shaped by tc, and after compression."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import xxhash
import zmq

from checks.link.payloads import noise
from megatron_opd.wire.link.wire import Packer

LINES = {"100 Mbit/s": 12_500_000, "1 Gbit/s": 125_000_000}
MIB = 1 << 20
LEAST_BYTES, MOST_BYTES = 32 << 20, 1 << 30
UNSHAPED_BYTES = 1 << 30
STAGE_BYTES = 64 << 20
CHUNK = 4 << 20
CHILD_S = 300.0


def _start(prefix: Sequence[str], end: str, told: dict[str, Any]) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "checks.link.mover", end]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    child.stdin.write(json.dumps(told) + "\n")
    child.stdin.flush()
    return child


@contextlib.contextmanager
def _ended(child: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill the child if it is not at its end by then: its other end has failed."""
    with child:
        try:
            yield child
        finally:
            child.kill()


def move(
    num_bytes: int,
    *,
    link: dict[str, Any] | None = None,
    payload: str = "noise",
    host: str = "127.0.0.1",
    prefixes: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> dict[str, Any]:
    """Move bytes between two processes; return the figures."""
    receiver, sender = zmq.curve_keypair(), zmq.curve_keypair()
    told = {"link": link or {}, "host": host, "payload": payload, "num_bytes": num_bytes}
    keys = {"secret": receiver[1].decode(), "peer": sender[0].decode()}
    with _ended(_start(prefixes[0], "receive", told | keys)) as far:
        assert far.stdout is not None
        address = json.loads(far.stdout.readline())["address"]
        keys = {"secret": sender[1].decode(), "peer": receiver[0].decode(), "address": address}
        with _ended(_start(prefixes[1], "send", told | keys)) as near:
            found = json.loads(near.communicate(timeout=CHILD_S)[0])
        received = json.loads(far.communicate(timeout=CHILD_S)[0])
    mib = found["bytes"] / MIB
    urgent = found["urgent_ms"]
    return {
        "mib": mib,
        "seconds": round(found["seconds"], 2),
        "mib_per_s": round(mib / found["seconds"], 1),
        "wire_bytes_per_byte": round(found["wire_bytes"] / found["bytes"], 4),
        "sender_cpu_ms_per_mib": round(1000 * found["cpu_s"] / mib, 2),
        "receiver_cpu_ms_per_mib": round(1000 * received["cpu_s"] / mib, 2),
        "urgent_answer_ms": urgent and {"median": round(urgent[0], 1), "longest": round(urgent[1])},
    }


def _of_line(row: dict[str, Any], bytes_per_s: int) -> dict[str, Any]:
    """Add the share of the line's rate that messages' own bytes had."""
    return row | {"share_of_line": round(row["mib_per_s"] * MIB / bytes_per_s, 3)}


def _size(bytes_per_s: int, seconds: float) -> int:
    return int(min(max(LEAST_BYTES, bytes_per_s * seconds), MOST_BYTES))


def own_limit(seconds: float) -> list[dict[str, Any]]:
    """Return a row for each rate of link.bytes_per_s, one without, and the stages' own speeds."""
    rows: list[dict[str, Any]] = []
    for name, rate in LINES.items():
        row = move(_size(rate, seconds), link={"bytes_per_s": rate})
        rows.append({"name": name} | _of_line(row, rate))
    for name, fields in (("no limit", {}), ("no limit, no compression", {"compression": 0})):
        rows.append({"name": name} | move(UNSHAPED_BYTES, link=fields))
    return [*rows, {"name": "each stage alone, MiB/s"} | stages()]


def stages() -> dict[str, float]:
    """Return what one core does of each stage alone, in MiB a second."""
    data = noise(STAGE_BYTES)
    views = [memoryview(data)[at : at + CHUNK] for at in range(0, STAGE_BYTES, CHUNK)]
    packer = Packer(3)

    def chunks() -> None:
        for view in views:
            packer.frames(0, 0, [view], 1)

    work: dict[str, Callable[[], object]] = {
        "blake2b": lambda: hashlib.blake2b(data, digest_size=32).digest(),
        "xxh3": lambda: xxhash.xxh3_64_intdigest(data),
        "chunks of noise (probe, xxh3)": chunks,
    }
    found = {name: _speed(run) for name, run in work.items()}
    return found | {"curve, one way (sender and receiver)": curve()}


def _speed(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return round(STAGE_BYTES / MIB / (time.perf_counter() - started_s), 0)


def curve() -> float:
    """Return what two bare ZeroMQ sockets with CURVE carry, frames of CHUNK bytes, MiB a second."""
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
        context.socket(zmq.PUSH) as push,
    ):
        pull.set(zmq.CURVE_SERVER, 1)
        pull.set(zmq.CURVE_SECRETKEY, server[1])
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.set(zmq.CURVE_SERVERKEY, server[0])
        push.set(zmq.CURVE_PUBLICKEY, client[0])
        push.set(zmq.CURVE_SECRETKEY, client[1])
        push.connect(f"tcp://127.0.0.1:{port}")
        data, count = noise(CHUNK), 4 * STAGE_BYTES // CHUNK
        push.send(data, copy=False)
        pull.recv()
        started_s = time.perf_counter()
        for _ in range(count):
            push.send(data, copy=False)
            pull.recv(copy=False)
        return round(count * CHUNK / MIB / (time.perf_counter() - started_s), 0)


NETWORKS = (
    ("100 Mbit/s", 12_500_000, 0),
    ("100 Mbit/s, round trip 50 ms", 12_500_000, 50),
    ("1 Gbit/s", 125_000_000, 0),
    ("1 Gbit/s, round trip 20 ms", 125_000_000, 20),
)


def in_namespaces(seconds: float) -> list[dict[str, Any]]:
    """Return a row for each shaped network; one that says why, where none can be made."""
    rows: list[dict[str, Any]] = []
    for name, rate, rtt_ms in NETWORKS:
        try:
            with _network(rate, rtt_ms) as (host, prefixes):
                row = move(_size(rate, seconds), host=host, prefixes=prefixes)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            rows.append({"name": name, "not_measured": said.strip()})
            continue
        rows.append({"name": name} | _of_line(row, rate))
    return rows


def _ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _network(
    bytes_per_s: int, rtt_ms: int
) -> Iterator[tuple[str, tuple[Sequence[str], Sequence[str]]]]:
    """Make two network namespaces joined by a line of this rate; remove them at the end."""
    names = [f"opd-link-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            _ip("ip", "netns", "add", name)
        _ip("ip", "link", "add", "ve", "netns", names[0], "type", "veth",
            "peer", "name", "ve", "netns", names[1])  # fmt: skip
        for side, name in enumerate(names):
            _ip("ip", "-n", name, "address", "add", f"10.209.7.{side + 1}/24", "dev", "ve")
            _ip("ip", "-n", name, "link", "set", "lo", "up")
            _ip("ip", "-n", name, "link", "set", "ve", "up")
            shape = ["tbf", "rate", f"{8 * bytes_per_s}bit", "burst", "256kb", "latency", "50ms"]
            if rtt_ms:
                _ip("tc", "-n", name, "qdisc", "add", "dev", "ve", "root", "handle", "1:",
                    "netem", "delay", f"{rtt_ms / 2}ms", "limit", "100000")  # fmt: skip
                _ip("tc", "-n", name, "qdisc", "add", "dev", "ve", "parent", "1:", *shape)
            else:
                _ip("tc", "-n", name, "qdisc", "add", "dev", "ve", "root", *shape)
        yield "10.209.7.1", tuple(["ip", "netns", "exec", name] for name in names)  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def compressed() -> list[dict[str, Any]]:
    """Return a row for each payload: what was sent for each byte."""
    return [{"name": name} | move(128 << 20, payload=name) for name in ("samples", "weights")]
